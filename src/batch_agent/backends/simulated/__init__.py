"""A deterministic model of an inference engine: prefill, decode, batching, a paged prefix cache, a queue.

``model`` its parameters · ``tokens`` stand-in tokeniser · ``blocks`` KV cache · ``core`` the engine, pure · ``runner``
the engine in time · ``answers`` what it says · ``backend`` in process · ``metrics`` as Prometheus text. Over HTTP it is
served by ``batch_agent.testing``. Its numbers are simulated and say so wherever they appear.
"""

from batch_agent.backends.simulated.backend import SimulatedBackend, from_address
from batch_agent.backends.simulated.instances import minimal_instance
from batch_agent.backends.simulated.model import EngineModel

__all__ = ["EngineModel", "SimulatedBackend", "from_address", "minimal_instance"]
