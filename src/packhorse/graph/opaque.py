def opaque_graph(entry,tensors,reason): raise NotImplementedError(reason)
