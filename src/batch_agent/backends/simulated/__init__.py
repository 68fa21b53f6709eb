"""A deterministic model of an inference engine: prefill, decode, batching, a paged prefix cache, a queue.

``model`` its parameters · ``tokens`` placeholder tokenizer · ``core`` its KV cache and the engine, pure ·
``answers`` its texts · ``backend`` the engine over time, in process.
``batch_agent.testing`` serves it over HTTP. Its numbers are simulated and are marked so wherever they appear.
"""

from batch_agent.backends.simulated.answers import minimal_instance
from batch_agent.backends.simulated.backend import SimulatedBackend, from_address
from batch_agent.backends.simulated.model import EngineModel

__all__ = ["EngineModel", "SimulatedBackend", "from_address", "minimal_instance"]
