import argparse
import os
import sys
import threading

if "--version" in sys.argv:
    sys.exit("version: 99999 (xllamacpp inside)")

import xllamacpp

parser = argparse.ArgumentParser()
for name in ("--model", "--alias", "--host"):
    parser.add_argument(name, required=True)
for name in ("--parallel", "--ctx-size"):
    parser.add_argument(name, type=int, required=True)
parser.add_argument("--threads", type=int)
parser.add_argument("--lora", action="append", default=[])
parser.add_argument("--jinja", action="store_true", required=True)
parser.add_argument("--no-webui", action="store_true", required=True)
given = parser.parse_args()
parameters = xllamacpp.CommonParams()
parameters.model.path = given.model
parameters.hostnames = [given.host]
parameters.n_parallel = given.parallel
parameters.n_ctx = given.ctx_size
parameters.api_keys = [os.environ["LLAMA_API_KEY"]]
server = xllamacpp.Server(parameters)
threading.Event().wait()
