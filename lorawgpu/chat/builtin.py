"""The built-in chat templates, as Jinja source. Each one uses its model's own special tokens.

chatml: Qwen, SmolLM and many others; llama-3: Llama 3 Instruct without its date preamble; bitnet: BitNet-b1.58-2B-4T;
gemma: Gemma 2 and 3, with the system prompt inside the first user turn; mistral: Mistral Instruct v0.3; alpaca:
Stanford's prompt, closed by the tokenizer's EOS.
"""

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

LLAMA_3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

BITNET = """\
{{- bos_token }}
{%- for message in messages %}
{{- message['role'] | capitalize + ': ' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- 'Assistant: ' }}
{%- endif %}"""

GEMMA = """\
{{- bos_token }}
{%- set system = messages[0]['content'] | trim + '\\n\\n' if messages[0]['role'] == 'system' else '' %}
{%- for message in (messages[1:] if system else messages) %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + (system if loop.first else '') + message['content'] | trim }}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<start_of_turn>model\\n' }}
{%- endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- set system = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' %}
{%- for message in (messages[1:] if system else messages) %}
{%- if message['role'] == 'user' %}
{{- '[INST] ' + (system if loop.first else '') + message['content'] + '[/INST]' }}
{%- elif message['role'] == 'assistant' %}
{{- ' ' + message['content'] + eos_token }}
{%- else %}
{{- raise_exception('the mistral template has no role ' + message['role'] + ' after the first message') }}
{%- endif %}
{%- endfor %}"""

ALPACA = """\
{%- for message in messages %}
{%- if loop.first %}
{%- if message['role'] == 'system' %}
{{- message['content'] + '\\n\\n' }}
{%- elif message['input'] %}
{{- 'Below is an instruction that describes a task, paired with an input that provides further context. ' }}
{{- 'Write a response that appropriately completes the request.\\n\\n' }}
{%- else %}
{{- 'Below is an instruction that describes a task. ' }}
{{- 'Write a response that appropriately completes the request.\\n\\n' }}
{%- endif %}
{%- endif %}
{%- if message['role'] == 'user' and message['input'] %}
{{- '### Instruction:\\n' + message['instruction'] + '\\n\\n### Input:\\n' + message['input'] + '\\n\\n' }}
{%- elif message['role'] == 'user' %}
{{- '### Instruction:\\n' + message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'assistant' %}
{{- '### Response:\\n' + message['content'] + eos_token }}
{{- '\\n\\n' if not loop.last else '' }}
{%- elif not loop.first %}
{{- raise_exception('the alpaca template has no role ' + message['role'] + ' after the first message') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '### Response:\\n' }}
{%- endif %}"""

FALLBACK = "tokenizer_default_fallback_"  # before a name: that template, if the model has none of its own
BUILT_IN = {
    "chatml": CHATML,
    "llama-3": LLAMA_3,
    "bitnet": BITNET,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "alpaca": ALPACA,
}
