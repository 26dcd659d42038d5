"""Renders chat templates of several forms with transformers, for the tests of zero's renderer.

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

# Templates that render a message otherwise by its place. « and » enclose what is trained: the tests have the templates
# without them, and the masks are those of the templates with generation blocks in their place.
DROPS_THOUGHTS = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and ns.last < 0 %}{% set ns.last = messages | length - loop.index %}{% endif %}
{%- endfor %}
{%- if tools %}{{- 'Tools: ' + tools | tojson + '\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content | default('', true) %}
        {%- set thought = message.reasoning_content | default('') %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}«
        {%- if loop.index0 > ns.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
        {{- content | trim }}
        {%- for call in message.tool_calls %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
        {{- '<|im_end|>\\n' }}»
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}
"""

CHANNELS = """\
{%- set turns = messages %}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{% set turns = messages[1:] %}{% endif %}
{%- for message in turns -%}
    {%- if message.role == 'assistant' -%}«
        {%- if loop.last and message.thinking is defined -%}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' -}}
        {%- endif -%}
        {%- if message.tool_calls -%}
            {{- '<|start|>assistant to=' + message.tool_calls[0].function.name + '<|channel|>commentary<|message|>' -}}
            {{- message.tool_calls[0].function.arguments | tojson + '<|call|>' -}}
        {%- else -%}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content -}}
            {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -}}
        {%- endif -%}
    »{%- else -%}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""

ENDS_TEXT = """\
{% for message in messages %}
{% if message.role == 'assistant' %}
{{ '<|assistant|>\\n' }}«{{ message.content + '<|end|>\\n' }}»{% elif message.role in ['system', 'user'] %}
{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|assistant|>\\n' }}{% elif messages[-1].role == 'assistant' %}
«{{ eos_token }}»{% else %}
{{ eos_token }}
{% endif %}
"""

RESULTS_IN_TURN = """\
{{- bos_token -}}
{%- set ns = namespace(open=false) -%}
{%- for i in range(messages | length) -%}
    {%- set message = messages[i] -%}
    {%- if message.role == 'assistant' -%}
        {%- if not ns.open -%}{{- '<turn>model\\n' -}}{%- endif -%}
        «{%- for call in message.tool_calls -%}{{- '<call>' + call.function.name + '</call>' -}}{%- endfor -%}»
        {%- set ns.open = false -%}
        {%- for k in range(i + 1, messages | length) -%}
            {%- set follow = messages[k] -%}
            {%- if follow.role != 'tool' -%}{%- break -%}{%- endif -%}
            {%- set ns.open = true -%}
            {{- '<result>' + follow.content + '</result>' -}}
        {%- endfor -%}
        «{{- message.content | default('', true) | trim -}}
        {%- if not ns.open -%}{{- '</turn>\\n' -}}{%- endif -%}»
    {%- elif message.role != 'tool' -%}
        {{- '<turn>' + message.role + '\\n' + message.content + '</turn>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.open -%}{{- '<turn>model\\n' -}}{%- endif -%}
"""

FIRST_TURN_HAS_MORE = """\
{% for message in messages %}{% if loop.first and message.role != 'system' %}<|im_start|>system
Be kind.<|im_end|>
{% endif %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}«{{ message.content }}<|im_end|>
»{% else %}{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""

HISTORIES = {
    "drops thoughts": DROPS_THOUGHTS,
    "channels": CHANNELS,
    "ends text": ENDS_TEXT,
    "results in turn": RESULTS_IN_TURN,
    "first turn has more": FIRST_TURN_HAS_MORE,
}

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


def call(content, arguments, name="weather", **more):
    one = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}
    return say("assistant", content, tool_calls=[one], **more)


def user(content):
    return say("user", content)


def reply(content, **more):
    return say("assistant", content, **more)


def result(content):
    return say("tool", content, name="weather", tool_call_id="call00001")


SYSTEM = say("system", "Be short.")
ZURICH = {"place": "Zürich"}
TURNS = {
    "one turn": [user("Who waits?"), reply("The host.")],
    "system": [SYSTEM, user("Who waits?"), reply("The host.")],
    "three turns": [SYSTEM, user("a"), reply("b"), user("c"), reply("d"), user("e"), reply("f")],
    "user last": [user("a"), reply("b"), user("c"), reply("d"), user("e")],
    "equal contents": [user("same"), reply("same"), user("same"), reply("same")],
    "reply in the question": [user("Say yes, not no."), reply("yes"), user("yes?"), reply("no")],
    "header as content": [user("assistant"), reply("assistant"), user("<|im_start|>assistant\n"), reply("<|im_start|>")],
    "empty replies": [user("a"), reply(""), user("b"), reply("")],
    "empty questions": [user(""), reply("a"), user(""), reply("b")],
    "white space": [user(" a\n"), reply("\n b \n"), user("\t"), reply(" \n"), user("c"), reply("d  ")],
    "unicode": [user("漢字?"), reply("Größe 🦀\u200b"), user("é\u0301"), reply("👩‍👩‍👧")],
    "jinja as content": [user("{{ a }} {% b %}"), reply("{# c #} {{ '}}' }} {% endfor %}"), user("d"), reply("{%")],
    "thought in content": [user("a"), reply("<think>\nhm\n</think>\n\nb"), user("c"), reply("<think>\nso\n</think>\n\nd")],
    "thought": [user("a"), reply("b", reasoning_content="hm"), user("c"), reply("d", reasoning_content="so")],
    "thought of one turn": [SYSTEM, user("a"), reply("b", reasoning_content="hm\nhm")],
    "thinking": [user("a"), reply("b", thinking="hm")],
    "thought without reply": [user("a"), reply("", reasoning_content="hm")],
    "open thought": [user("a"), reply("<think>b"), user("c"), reply("</think>d")],
    "tool": [user("a"), call("", ZURICH), result("3"), reply("3 degrees.")],
    "tool without content": [user("a"), call(None, ZURICH), result('{"sun": true}'), reply("Sun.")],
    "tool with content": [user("a"), call("I look.", ZURICH), result("3"), reply("3.")],
    "tool and thought": [user("a"), call("", ZURICH, reasoning="hm"), result("3"), reply("b", reasoning_content="so")],
    "two tools": [user("a"), call("", ZURICH), result("3"), call("", {"place": "Bern"}), result("3"), reply("Both 3.")],
    "tools and turns": [SYSTEM, user("a"), call("", ZURICH), result("3"), reply("3."), user("c"), reply("d")],
    "tool last": [user("a"), call("", ZURICH), result("3")],
    "tool call last": [user("a"), call("", ZURICH)],
    "tool arguments as text": [user("a"), call("", '{"place": "Zürich"}'), result("3"), reply("b")],
    "assistant first": [reply("a"), user("b"), reply("c")],
    "two replies": [user("a"), reply("b"), reply("c"), user("d"), reply("e")],
}


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, datetime.timezone.utc)


def history(tokenizer, template):
    """The template without marks, and for each conversation the mask of its tokens, or nothing if it is refused."""
    plain = template.replace("«", "").replace("»", "")
    marked = template.replace("«", "{% generation %}").replace("»", "{% endgeneration %}")
    masks = {}
    for title, messages in TURNS.items():
        tools = [TOOL] if "tool" in title else None
        messages = json.loads(json.dumps(messages))
        try:
            text = tokenizer.apply_chat_template(messages, tools, chat_template=plain, tokenize=False)
        except Exception as error:
            print("refused", title, error)
            masks[title] = None
            continue
        out = tokenizer.apply_chat_template(
            messages, tools, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
        )
        assert out["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"], title
        masks[title] = "".join(map(str, out["assistant_masks"]))
    return {"template": plain, "masks": masks}


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
    result = {
        "now": NOW,
        "templates": TEMPLATES,
        "conversations": CONVERSATIONS,
        "renderings": renderings,
        "turns": TURNS,
        "histories": {name: history(made, template) for name, template in HISTORIES.items()},
    }
    (OUT / "chat.json").write_text(json.dumps(result, ensure_ascii=False, indent=0) + "\n")
    for one in renderings:
        print(one["template"], one["conversation"], one.get("error", "ok"))


if __name__ == "__main__":
    main()
