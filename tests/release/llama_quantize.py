import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, Keys, quants

source, target, kind = sys.argv[1:]
if kind not in ("Q4_0", "Q5_0"):
    sys.exit(f"main: this llama-quantize does not know {kind}")
number_type = GGMLQuantizationType[kind]
reader = GGUFReader(source)
writer = GGUFWriter(target, reader.fields[Keys.General.ARCHITECTURE].contents())
for name, field in reader.fields.items():
    if not name.startswith("GGUF.") and name != Keys.General.ARCHITECTURE:
        element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=element)
for tensor in reader.tensors:
    data, stored = tensor.data, tensor.tensor_type
    if stored == GGMLQuantizationType.F16 and len(tensor.shape) == 2 and tensor.shape[0] % 32 == 0:
        data, stored = quants.quantize(data.astype(np.float32), number_type), number_type
    writer.add_tensor(tensor.name, data, raw_dtype=stored)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
