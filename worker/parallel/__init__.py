"""One model in several processes: some heads of some layers in each (tensor, pipeline parallel)."""
