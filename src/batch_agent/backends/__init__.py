"""Where inference happens: one package per wire. ``base`` has the base class, ``registry`` finds a backend by URL."""
