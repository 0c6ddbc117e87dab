import sys

from hivetune.llama.wheel import main

if "--version" in sys.argv:
    sys.exit("version: 99999 (xllamacpp inside)")
main()
