"""From a layout to work of the device that comes again: few shapes, tables that are written by copy, graphs."""
