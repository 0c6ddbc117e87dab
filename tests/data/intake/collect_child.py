"""A collector as `hivetune collect --follow` runs it, with batches so small that a kill meets every state.

Arguments: rows per batch, sources. Says "ready" before it starts.
"""

import signal
import sys
import threading

from hivetune.data.intake.collect import collect
from hivetune.data.intake.sources import jsonl, redis_stream, sqlite
from hivetune.data.intake.sources.parse import parse_sources

jsonl._BATCH_ROWS = redis_stream._BATCH_ROWS = sqlite.PAGE_ROWS = int(sys.argv[1])
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
print("ready", flush=True)
collect(parse_sources(sys.argv[2:]), follow=True, stop=stop)
