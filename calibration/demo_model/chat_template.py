"""Jinja chat template of the demo model: ChatML, with tools in the Hermes convention.

A Python constant rather than a data file, so that it is there in every kind of installation. The
model folder gets it as `chat_template.jinja`, from where vLLM and transformers read it.
"""

CHAT_TEMPLATE = r"""{#- Content of a message is a string or a list of text parts. -#}
{%- macro render_content(content, role) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is not none and content is defined -%}
        {%- for part in content -%}
            {%- if part is string -%}
                {{- part -}}
            {%- elif part.type == 'text' -%}
                {{- part.text -}}
            {%- else -%}
                {{- raise_exception('content part of type "' ~ part.type ~ '" in a ' ~ role
                    ~ ' message: this model reads text only, send parts of type "text"') -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- if tools -%}
    {{- '<|im_start|>system\n' -}}
    {%- if has_system -%}
        {{- render_content(messages[0].content, 'system') ~ '\n\n' -}}
    {%- endif -%}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' -}}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' -}}
    {%- for tool in tools -%}
        {{- '\n' -}}{{- tool | tojson -}}
    {%- endfor -%}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and ' -}}
    {{- 'arguments within <tool_call></tool_call> XML tags:\n' -}}
    {{- '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n' -}}
    {{- '</tool_call><|im_end|>\n' -}}
{%- elif has_system -%}
    {{- '<|im_start|>system\n' ~ render_content(messages[0].content, 'system') -}}
    {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'system' and loop.first -%}
    {%- elif message.role in ('system', 'user') -%}
        {{- '<|im_start|>' ~ message.role ~ '\n' -}}
        {{- render_content(message.content, message.role) ~ '<|im_end|>\n' -}}
    {%- elif message.role == 'assistant' -%}
        {%- set text = render_content(message.content, 'assistant') -%}
        {{- '<|im_start|>assistant\n' ~ text -}}
        {%- for tool_call in message.tool_calls or [] -%}
            {%- set function = tool_call.function if tool_call.function else tool_call -%}
            {%- if text or not loop.first -%}{{- '\n' -}}{%- endif -%}
            {{- '<tool_call>\n{"name": ' -}}{{- function.name | tojson -}}{{- ', "arguments": ' -}}
            {%- if function.arguments is string -%}
                {{- function.arguments -}}
            {%- else -%}
                {{- function.arguments | tojson -}}
            {%- endif -%}
            {{- '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- elif message.role == 'tool' -%}
        {#- Consecutive tool results share one user turn, as Hermes and Qwen models expect. -#}
        {%- if loop.first or loop.previtem.role != 'tool' -%}
            {{- '<|im_start|>user' -}}
        {%- endif -%}
        {{- '\n<tool_response>\n' ~ render_content(message.content, 'tool') -}}
        {{- '\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}
            {{- '<|im_end|>\n' -}}
        {%- endif -%}
    {%- else -%}
        {{- raise_exception('message role "' ~ message.role
            ~ '" is not known: use system, user, assistant or tool') -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
