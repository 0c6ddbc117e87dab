"""A collector as `hivetune collect --follow` runs it, with batches so small that a kill meets every state.

Arguments: rows per batch, sources. Says "ready" before it starts.
"""

import signal
import sys
import threading

from hivetune.data.intake import logs, streams, tables
from hivetune.data.intake.collect import collect, parse_sources

logs._BATCH_ROWS = streams._BATCH_ROWS = tables.PAGE_ROWS = int(sys.argv[1])
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
print("ready", flush=True)
collect(parse_sources(sys.argv[2:]), follow=True, stop=stop)
