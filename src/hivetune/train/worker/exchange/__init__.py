"""One step's packs computed by any number of workers, with one sum: the same bits whoever computed which pack."""
