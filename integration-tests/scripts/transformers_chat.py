"""Renders chat templates of seven forms with transformers, for the tests of zero's renderer.

The templates are written from the public descriptions of the formats. Writes tests/data/examples/chat.json. Needs
transformers and jinja2:  python transformers_chat.py
"""

import datetime
import json
import pathlib

from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

OUT = pathlib.Path(__file__).parent.parent / "tests/data/examples"
NOW = 1722000000

CHATML = """\
{%- if messages[0]['role'] != 'system' -%}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

MARKED = """\
{% for message in messages %}
{% if message['role'] == 'assistant' %}
<|im_start|>assistant
    {%- generation %}

{{ message['content'] }}<|im_end|>
    {%- endgeneration %}

{% else %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}
{% set system = '<<SYS>>\\n' + messages[0]['content'] | trim + '\\n<</SYS>>\\n\\n' %}
{% set turns = messages[1:] %}
{% else %}
{% set system = '' %}
{% set turns = messages %}
{% endif %}
{% for message in turns %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant') }}
{% endif %}
{% if loop.index0 == 0 %}{% set content = system + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}
{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}
{{- ' ' + content.strip() + ' ' + eos_token }}
{%- endif %}
{% endfor %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none and tools is defined %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'ipython' or message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("only single tool-calls at once") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}" }}{{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages if message.role in ("user", "assistant") %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- " [INST] " + system_message + "\\n\\n" + message["content"] + " [/INST]" }}
        {%- else %}
            {{- " [INST] " + message["content"] + " [/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- else %}
        {{- raise_exception("only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}
"""

ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""

# Thoughts of earlier turns are dropped, so a beginning is rendered otherwise when more follows.
THINKING = """\
{%- macro turn(role, content) -%}
<|im_start|>{{ role }}
{{ content }}<|im_end|>
{% endmacro -%}
{%- set ns = namespace(last=messages|length - 1, search=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.search and message.role == "user" and message.content is string and not message.content.startswith('<tool>') %}
        {%- set ns.search = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "system" and not loop.first %}{% continue %}{% endif %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > ns.last %}
            {{- turn('assistant', '<think>\\n\\n</think>\\n\\n' ~ content) }}
        {%- else %}
            {{- turn('assistant', content) }}
        {%- endif %}
    {%- else %}
        {{- turn(message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

TEMPLATES = {
    "chatml": CHATML,
    "marked": MARKED,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "zephyr": ZEPHYR,
    "thinking": THINKING,
}


def say(role, content, **more):
    return {"role": role, "content": content, **more}


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place, such as 'Zürich' <now>",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich & <b>", "days": 2}}}
CONVERSATIONS = {
    "one turn": [say("user", "Who waits?"), say("assistant", "The host.")],
    "system and two turns": [
        say("system", "  Be short. "),
        say("user", "Who sums?"),
        say("assistant", " All ranks.\n"),
        say("user", "\tIn which order?\n\n"),
        say("assistant", "In rank order: 漢字, Größe 🦀."),
    ],
    "wrong order": [say("user", "One."), say("user", "Two."), say("assistant", "Three.")],
    "tool": [
        say("user", "The weather?"),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        say("tool", '{"sun": true}'),
        say("assistant", "Sun."),
    ],
    "quotes": [say("user", "{{ 'a' }} {% raw %} \"b\" \\n <&>"), say("assistant", "<think>\nhm\n</think>\n\nYes 'c'.")],
}


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, datetime.timezone.utc)


def main():
    chat_template_utils.datetime = Clock
    made = PreTrainedTokenizerFast(
        tokenizer_file=str(OUT / "tokenizer/tokenizer.json"), bos_token="<|im_start|>", eos_token="<|end|>"
    )
    renderings = []
    for name, template in TEMPLATES.items():
        for title, messages in CONVERSATIONS.items():
            tools = [TOOL] if title == "tool" else None
            one = {"template": name, "conversation": title, "tools": tools}
            given = {"chat_template": template, "tools": tools}
            try:
                one["text"] = made.apply_chat_template(messages, tokenize=False, **given)
                one["prompt"] = made.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True, **given)
            except Exception as error:
                one["error"] = str(error)
            if name == "marked":
                out = made.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **given)
                one["tokens"], one["mask"] = list(out["input_ids"]), list(out["assistant_masks"])
            renderings.append(one)
    result = {"now": NOW, "templates": TEMPLATES, "conversations": CONVERSATIONS, "renderings": renderings}
    (OUT / "chat.json").write_text(json.dumps(result, ensure_ascii=False, indent=0) + "\n")
    for one in renderings:
        print(one["template"], one["conversation"], one.get("error", "ok"))


main()
