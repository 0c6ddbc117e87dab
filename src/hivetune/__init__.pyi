from hivetune.walk import check as check
from hivetune.walk import configure as configure
from hivetune.walk import evaluate as evaluate
from hivetune.walk import export as export
from hivetune.walk import gate as gate
from hivetune.walk import open_trained as open_trained
from hivetune.walk import plan as plan
from hivetune.walk import prepare as prepare
from hivetune.walk import register as register
from hivetune.walk import serve as serve
from hivetune.walk import train as train

__version__: str
