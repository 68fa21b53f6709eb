"""Where inference happens: one package per wire, behind the base class in ``base``, found by URL in ``registry``."""
