"""Where inference happens: one wire form per file, behind the protocol of ``base``, found by URL in ``registry``."""
