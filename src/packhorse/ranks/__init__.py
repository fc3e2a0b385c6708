"""Several processes that train one model: who runs what, what goes between them, and how it goes."""
