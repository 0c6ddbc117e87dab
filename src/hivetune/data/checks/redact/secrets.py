"""Secrets with a form of their own: keys that begin as their makers let them, key blocks, web tokens, webhooks.

Sources: the makers' documentation of their tokens and what they tell secret scanners. A prefix has at least three
characters that no word begins with, and the rest a minimal length, so that no entropy has to be guessed.
"""

import base64
import re

from hivetune.data.checks.redact.rules import Rule, Tried
from hivetune.data.checks.redact.values import has_digit_and_letter

# name, title, markers (with | between), pattern, which begins with its marker and not in the middle of a word: so each
# word is read once, however often it holds the prefix.
PREFIXED: tuple[tuple[str, str, str, str], ...] = (
    ("github", "GitHub token", "ghp_|gho_|ghu_|ghs_|ghr_", r"gh[pousr]_[A-Za-z0-9]{36,255}"),
    ("github", "GitHub token", "github_pat_", r"github_pat_\w{60,255}"),
    ("gitlab", "GitLab token", "gl", r"gl(?:pat|rt|dt|ptt|cbt|ft|soat|agent|imt|oas|ffct|wt|rtr)-[\w.-]{20,300}"),
    ("gitlab", "GitLab runner token", "GR1348941", r"GR1348941[\w-]{20}"),
    ("bitbucket", "Bitbucket app password", "ATBB", r"ATBB[A-Za-z0-9]{32}"),
    ("atlassian", "Atlassian token", "ATATT3|ATCTT3|ATSTT3", r"AT[ACS]TT3[\w=-]{40,300}"),
    ("aws-key-id", "AWS access key id", "AKIA|ASIA|ABIA|ACCA", r"A(?:KIA|SIA|BIA|CCA)[A-Z0-9]{16}(?![\w-])"),
    ("aws-session", "AWS session token", "IQoJb3JpZ2lu", r"IQoJb3JpZ2lu[A-Za-z0-9+/=%]{80,2000}"),
    (
        "aws-bedrock",
        "AWS Bedrock key",
        "ABSK|bedrock-api-key-",
        r"(?:ABSK|bedrock-api-key-)[A-Za-z0-9+/]{60,200}={0,2}",
    ),
    ("anthropic", "Anthropic key", "sk-ant-", r"sk-ant-[\w-]{20,200}"),
    ("openrouter", "OpenRouter key", "sk-or-", r"sk-or-(?:v\d-)?[\w-]{20,100}"),
    ("langfuse", "Langfuse key", "sk-lf-", r"sk-lf-[\w-]{20,60}"),
    ("openai", "OpenAI key", "sk-", r"sk-(?:proj-|svcacct-|admin-|None-)[\w-]{24,300}"),
    ("openai", "API key", "sk-", r"sk-[A-Za-z0-9]{20,80}(?![\w-])"),
    ("hivetune", "Hivetune token", "hive-", r"hive-[\w-]{43}(?![\w-])"),  # serve/gateway/clients.py; answers' ids: 24
    ("groq", "Groq key", "gsk_", r"gsk_[A-Za-z0-9]{40,80}"),
    ("xai", "xAI key", "xai-", r"xai-[A-Za-z0-9]{60,120}"),
    ("perplexity", "Perplexity key", "pplx-", r"pplx-[A-Za-z0-9]{32,80}"),
    ("replicate", "Replicate token", "r8_", r"r8_[A-Za-z0-9]{37,60}"),
    ("fireworks", "Fireworks key", "fw_", r"fw_[A-Za-z0-9]{22,40}"),
    ("nvidia", "NVIDIA key", "nvapi-", r"nvapi-[\w-]{40,100}"),
    ("cerebras", "Cerebras key", "csk-", r"csk-[a-z0-9]{40,60}"),
    ("huggingface", "Hugging Face token", "hf_", r"hf_[A-Za-z0-9]{30,60}"),
    ("huggingface", "Hugging Face token", "api_org_", r"api_org_[A-Za-z0-9]{34}"),
    ("langsmith", "LangSmith key", "lsv2_", r"lsv2_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{10}"),
    ("pinecone", "Pinecone key", "pcsk_", r"pcsk_\w{30,120}"),
    ("tavily", "Tavily key", "tvly-", r"tvly-[\w-]{24,60}"),
    ("elevenlabs", "ElevenLabs key", "sk_", r"sk_[0-9a-f]{48}"),
    ("google", "Google API key", "AIza", r"AIza[\w-]{35}"),
    ("google", "Google API key", "AQ.", r"AQ\.[\w-]{40,80}"),
    ("google-oauth", "Google OAuth token", "ya29.", r"ya29\.[\w-]{20,400}"),
    ("google-oauth", "Google client secret", "GOCSPX-", r"GOCSPX-[\w-]{28}"),
    ("google-oauth", "Google refresh token", "1//0", r"1//0[\w-]{30,120}"),
    ("slack", "Slack token", "xox", r"xox[a-z](?:\.xox[a-z])?-[\w+/-]{10,250}"),
    ("slack", "Slack token", "xapp-", r"xapp-\d-[A-Za-z0-9-]{10,250}"),
    ("stripe", "Stripe key", "sk_live_|sk_test_|rk_live_|rk_test_", r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,250}"),
    ("stripe", "webhook signing secret", "whsec_", r"whsec_[A-Za-z0-9+/=]{24,100}"),
    ("square", "Square token", "EAAA", r"EAAA[\w-]{60}(?![\w-])"),
    ("square", "Square secret", "sq0", r"sq0(?:csp|atp|idp)-[\w-]{22,60}"),
    (
        "paypal",
        "PayPal access token",
        "access_token$",
        r"access_token\$(?:production|sandbox)\$[0-9a-z]{16}\$[0-9a-f]{32}",
    ),
    ("facebook", "Facebook token", "EAA", r"EAA[A-Za-z0-9]{80,400}"),
    ("twitter", "X bearer token", "AAAAAAAAAAAAAAAAAAAA", r"AAAAAAAAAAAAAAAAAAAA[A-Za-z0-9%]{60,120}"),
    ("shopify", "Shopify token", "shpat_|shpss_|shpca_|shppa_", r"shp(?:at|ss|ca|pa)_[0-9a-fA-F]{32}"),
    ("twilio", "Twilio key", "SK", r"SK[0-9a-f]{32}"),
    ("sendgrid", "SendGrid key", "SG.", r"SG\.[\w-]{16,32}\.[\w-]{16,64}"),
    ("mailgun", "Mailgun key", "key-", r"key-[0-9a-f]{32}"),
    ("brevo", "Brevo key", "xkeysib-|xsmtpsib-", r"x(?:key|smtp)sib-[0-9a-f]{64}-[A-Za-z0-9]{16}"),
    ("resend", "Resend key", "re_", r"re_[A-Za-z0-9]{8}_[A-Za-z0-9]{20,32}"),
    ("npm", "npm token", "npm_", r"npm_[A-Za-z0-9]{36}"),
    ("pypi", "PyPI token", "pypi-", r"pypi-AgE[\w-]{50,400}"),
    ("rubygems", "RubyGems key", "rubygems_", r"rubygems_[0-9a-f]{48}"),
    ("nuget", "NuGet key", "oy2", r"oy2[a-z0-9]{43}"),
    ("crates", "crates.io token", "cio", r"cio[A-Za-z0-9]{32}"),
    ("docker", "Docker token", "dckr_", r"dckr_(?:pat|oat)_[\w-]{27,40}"),
    ("digitalocean", "DigitalOcean token", "dop_v1_|doo_v1_|dor_v1_", r"do[opr]_v1_[0-9a-f]{64}"),
    ("heroku", "Heroku key", "HRKU-", r"HRKU-AA[\w-]{50,70}"),
    ("netlify", "Netlify token", "nf", r"nf[pcobu]_[A-Za-z0-9]{36}"),
    ("vercel", "Vercel token", "vc", r"vc[pikar]_[A-Za-z0-9]{24,60}"),
    ("fly", "Fly.io token", "fm1a_|fm1r_|fm2_", r"fm\d[a-z]?_[\w+/=,-]{40,2000}"),
    ("fly", "Fly.io token", "fo1_", r"fo1_[\w-]{43}"),
    ("cloudflare", "Cloudflare key", "v1.0-", r"v1\.0-[0-9a-f]{24}-[0-9a-f]{146}"),
    ("newrelic", "New Relic key", "NRAK-|NRII-|NRJS-|NRAL", r"NR(?:AK|II|JS|AL)-?[\w-]{19,40}"),
    ("sentry", "Sentry token", "sntry", r"sntry[su]_[\w+/=-]{40,400}"),
    ("grafana", "Grafana token", "glsa_|glc_|eyJrIjoi", r"(?:glsa_[A-Za-z0-9]{32}_[0-9a-f]{8}|glc_[\w+/=-]{32,400})"),
    ("linear", "Linear key", "lin_", r"lin_(?:api|oauth)_[A-Za-z0-9]{32,80}"),
    ("notion", "Notion token", "ntn_|secret_", r"(?:ntn_[A-Za-z0-9]{40,60}|secret_[A-Za-z0-9]{43})"),
    ("airtable", "Airtable token", "pat", r"pat[A-Za-z0-9]{14}\.[0-9a-f]{64}"),
    ("asana", "Asana token", "1/1|2/1", r"\d/\d{15,18}(?:/\d{15,18})?:[0-9a-f]{32}"),
    ("figma", "Figma token", "fig", r"fig(?:d|o|or|u)_[\w-]{38,60}"),
    ("postman", "Postman key", "PMAK-|PMAT-", r"PMA[KT]-[\w-]{26,70}"),
    ("dropbox", "Dropbox token", "sl.", r"sl\.(?:u\.)?[\w-]{120,1500}"),
    ("hubspot", "HubSpot token", "pat-", r"pat-(?:na|eu|ap)\d-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
    ("mapbox", "Mapbox token", "sk.eyJ|tk.eyJ", r"[ts]k\.eyJ[\w-]{40,200}\.[\w-]{20,40}"),
    ("databricks", "Databricks token", "dapi", r"dapi[0-9a-f]{32}(?:-\d)?"),
    ("supabase", "Supabase key", "sbp_|sb_secret_", r"(?:sbp_(?:v0_)?[0-9a-f]{40}|sb_secret_[\w-]{20,60})"),
    ("planetscale", "PlanetScale secret", "pscale_", r"pscale_(?:pw|tkn|oauth)_[\w.=-]{32,64}"),
    ("vault", "Vault token", "hvs.|hvb.|hvr.", r"hv[sbr]\.[\w-]{24,300}"),
    ("vault", "Vault token", "s.", r"s\.[A-Za-z0-9]{24}(?![\w.-])"),
    ("pulumi", "Pulumi token", "pul-", r"pul-[0-9a-f]{40}"),
    ("doppler", "Doppler token", "dp.", r"dp\.(?:pt|st|ct|sa|scim|audit)\.(?:[\w-]{2,35}\.)?[A-Za-z0-9]{40,44}"),
    ("1password", "1Password token", "ops_eyJ", r"ops_eyJ[\w+/=-]{200,2000}"),
    (
        "1password",
        "1Password secret key",
        "A3-",
        r"A3-[A-Z0-9]{6}-(?:[A-Z0-9]{11}|[A-Z0-9]{6}-[A-Z0-9]{5})(?:-[A-Z0-9]{5}){3}",
    ),
    ("tailscale", "Tailscale key", "tskey-", r"tskey-[a-z]{2,12}-[A-Za-z0-9]{8,32}-[A-Za-z0-9]{16,64}"),
    ("age", "age secret key", "AGE-SECRET-KEY-", r"AGE-SECRET-KEY-(?:PQ-)?1[A-Z0-9]{58,80}"),
    (
        "discord",
        "Discord bot token",
        "MD|MT|Mj|Mz|ND|NT|Nj|Nz|OD|OT|Oj|Oz",
        r"[MNO][A-Za-z\d_-]{23,27}\.[\w-]{6}\.[\w-]{27,40}",
    ),
    ("alibaba", "Alibaba Cloud key id", "LTAI", r"LTAI[A-Za-z0-9]{16,24}(?![\w-])"),
    ("adobe", "Adobe client secret", "p8e-", r"p8e-[A-Za-z0-9_-]{32}"),
    ("clickhouse", "ClickHouse key", "4b1d", r"4b1d[A-Za-z0-9]{38}(?!\w)"),
    ("clojars", "Clojars token", "CLOJARS_", r"CLOJARS_[A-Za-z0-9]{60}"),
    ("circleci", "CircleCI token", "CCIPAT_|CCIPRJ_", r"CCIP(?:AT|RJ)_[A-Za-z0-9]{10,40}_[0-9a-f]{40}"),
    ("buildkite", "Buildkite token", "bkua_", r"bkua_[0-9a-z]{40}"),
    ("infracost", "Infracost key", "ico-", r"ico-[A-Za-z0-9]{32}"),
    (
        "launchdarkly",
        "LaunchDarkly key",
        "api-|sdk-|mob-",
        r"(?:api|sdk|mob)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    ),
    ("lob", "Lob key", "live_|test_", r"(?:live|test)_[0-9a-f]{35}"),
    ("openshift", "OpenShift token", "sha256~", r"sha256~[\w-]{43}"),
    ("scalingo", "Scalingo token", "tk-us-", r"tk-us-[\w-]{48}"),
    ("shippo", "Shippo token", "shippo_", r"shippo_(?:live|test)_[0-9a-f]{40}"),
    ("sourcegraph", "Sourcegraph token", "sgp_", r"sgp_(?:[0-9a-f]{16}_|local_)?[0-9a-f]{40}"),
    ("aiven", "Aiven password", "AVNS_", r"AVNS_[\w-]{19}"),
    ("yandex", "Yandex key", "AQVN|YCAJ", r"(?:AQVN[\w-]{35,38}|YCAJ[\w-]{21})"),
    ("posthog", "PostHog key", "phx_", r"phx_[A-Za-z0-9]{40,60}"),
    ("jina", "Jina key", "jina_", r"jina_[\w-]{40,70}"),
    ("apify", "Apify token", "apify_api_", r"apify_api_[A-Za-z0-9]{30,50}"),
    ("contentful", "Contentful token", "CFPAT-", r"CFPAT-[\w-]{40,50}"),
    ("e2b", "E2B key", "e2b_", r"e2b_[0-9a-f]{40}"),
    ("firecrawl", "Firecrawl key", "fc-", r"fc-[0-9a-f]{32}"),
    ("trello", "Trello token", "ATTA", r"ATTA[0-9a-f]{64,76}"),
    ("docker", "Docker Swarm token", "SWMTKN-", r"SWMTKN-1-[a-z0-9]{40,52}-[a-z0-9]{20,30}"),
    (
        "authress",
        "Authress key",
        "sc_|ext_|authress_",
        r"(?:sc|ext|authress)_[A-Za-z0-9]{5,30}\.[A-Za-z0-9]{4,6}\.acc[_-][\w-]{10,32}\.[\w+/=-]{30,120}",
    ),
    ("duffel", "Duffel token", "duffel_", r"duffel_(?:test|live)_[\w=-]{40,60}"),
    ("flutterwave", "Flutterwave key", "FLWSEC", r"FLWSECK(?:_TEST)?-[0-9a-f]{12,40}(?:-X)?"),
    ("razorpay", "Razorpay key", "rzp_", r"rzp_(?:live|test)_[A-Za-z0-9]{14,24}"),
    (
        "plaid",
        "Plaid token",
        "access-",
        r"access-(?:sandbox|development|production)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    ),
    ("dynatrace", "Dynatrace token", "dt0", r"dt0[a-z]\d{2}\.[A-Z0-9]{24}\.[A-Z0-9]{64}"),
    ("frameio", "Frame.io token", "fio-u-", r"fio-u-[\w=-]{60,70}"),
    ("easypost", "EasyPost key", "EZ", r"EZ[AT]K[A-Za-z0-9]{54}"),
    ("typeform", "Typeform token", "tfp_", r"tfp_[\w.=-]{59}"),
    ("prefect", "Prefect key", "pnu_", r"pnu_[A-Za-z0-9]{36}"),
    ("readme", "ReadMe key", "rdme_", r"rdme_[a-z0-9]{70}"),
    ("artifactory", "Artifactory token", "AKCp|cmVmdGtu", r"(?:AKCp[A-Za-z0-9]{69}|cmVmdGtu[A-Za-z0-9]{56})"),
    ("adafruit", "Adafruit key", "aio_", r"aio_[A-Za-z0-9]{28}"),
    ("jwt", "JSON web token", "eyJ", r"(?<!-)eyJ[\w-]{10,2000}+\.eyJ[\w-]{10,4000}+\.[\w-]{10,2000}"),
    (
        "jwt",
        "encrypted web token",
        "eyJ",
        r"(?<!-)eyJ[\w-]{10,1000}+\.[\w-]{0,700}+\.[\w-]{10,40}+\.[\w-]{10,4000}+\.[\w-]{10,40}",
    ),
)

CHECKSUM_NAME = re.compile(r"(?:sha\d{0,3}|md5|blake\w{0,3})[-_~]\Z", re.IGNORECASE)
# What providers put in front of the ids of calls, messages and runs: no secret, and ids that are equal no longer pair.
ID_NAME = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:srv)?toolu|call|fc|msg|message|req|request|resp|rs|run|step|thread|asst|chatcmpl|cmpl|gen|batch"
    r"|file|event|evt|user|org|proj|sess|session|conv|trace|span|lc_run-?|id)[_-]\Z",
    re.IGNORECASE,
)
RUN_OF_LETTERS = re.compile(r"[a-z]{5}|[A-Z]{5}")
# Any maker's token: a short name in front, and 24 characters or more that no person typed.
NAMED_TOKEN = r"(?<![\w.-])[A-Za-z][A-Za-z0-9]{1,11}[_~-](?:[A-Za-z0-9]{1,10}[_-]){0,2}([A-Za-z0-9]{24,160})(?![\w-])"

# The marker stands inside: these are searched for.
INSIDE: tuple[tuple[str, str, str, str], ...] = (
    ("mailchimp", "Mailchimp key", "-us", r"[0-9a-f]{32}-us\d{1,2}"),
    ("terraform", "Terraform token", ".atlasv1.", r"[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{60,80}"),
    ("telegram", "Telegram bot token", ":AA", r"\d{8,10}:AA[\w-]{32,35}"),
    ("azure", "Azure client secret", "Q~", r"[\w.~-]{3}\dQ~[\w.~-]{31,34}"),
)

# The same as INSIDE, with the part to replace in group 1.
PLACED: tuple[tuple[str, str, str, str], ...] = (
    (
        "slack-webhook",
        "Slack webhook",
        "hooks.slack.com",
        r"https://hooks\.slack\.com/(?:services|workflows|triggers)/([\w/]{20,120})",
    ),
    (
        "discord-webhook",
        "Discord webhook",
        "/api/webhooks/",
        r"https://(?:\w{1,12}\.)?discord(?:app)?\.com/api/webhooks/\d{10,25}/([\w-]{40,100})",
    ),
    (
        "teams-webhook",
        "Teams webhook",
        "webhook.office.com",
        r"webhook\.office\.com/webhookb2/([0-9a-f-]{36}@[0-9a-f-]{36}/IncomingWebhook/[0-9a-f]{32}/[0-9a-f-]{36}[\w/-]{0,60})",
    ),
    ("sumologic", "Sumo Logic collector address", "/receiver/v1/http/", r"/receiver/v1/http/([\w=-]{40,200})"),
    ("sentry-dsn", "Sentry DSN", "sentry", r"https://([0-9a-f]{32})(?::[0-9a-f]{32})?@[\w.-]{0,60}sentry"),
    ("azure-sas", "signed Azure address", "sig=", r"[?&]sig=([A-Za-z0-9%/+=]{40,100})"),
    ("aws-signature", "signed AWS address", "X-Amz-Signature=", r"X-Amz-Signature=([0-9a-f]{64})"),
)

# Lines of base64 with real or escaped line breaks, headers such as "Proc-Type: 4,ENCRYPTED" among them; the end may be
# missing. Possessive: what was read is never given back, so the time is that of one pass.
NO_KEY = ("xxxxx", "your", "placeholder", "redacted", "_here", "-here", "00000000")
PEM = (
    r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:\s|\\[nrt]|[A-Za-z0-9+/=]|[\"',.…]|(?:Proc-Type|DEK-Info|Version|Comment|Hash): [^\n\\]{1,80}+){6,20000}+"
    r"(?:-----END [A-Z0-9 ]{1,40}-----(?:\\n)?)?"
)
PUTTY = r"PuTTY-User-Key-File-\d: [\w -]{1,40}(?:\r?\n[^\n]{1,100}+){1,200}+"


def _secret(name: str, title: str, markers: str, pattern: str, *, tried: Tried, group: int = 0) -> Rule:
    compiled = re.compile(pattern if group else rf"(?<![A-Za-z0-9_]){pattern}", re.ASCII)
    shown, marked = f"[SECRET:{name}]", tuple(markers.split("|"))
    return Rule(name, title, shown, compiled, marked, "long-word", tried, group, holds=_is_real)


def _is_real(text: str, start: int, end: int) -> bool:
    """Not `sk-xxxx...` and not a name of words that happens to begin so."""
    value = text[start:end]
    if len(set(value[4:].lower())) <= 3 or any(part in value.lower() for part in NO_KEY):
        return False
    return has_digit_and_letter(value[4:]) or value.isupper() or _is_one_word(value)


def _is_one_word(value: str) -> bool:
    """Letters only, but more of them than any word has: Hugging Face once made such tokens."""
    body = value.rpartition("_")[2]
    return len(body) >= 30 and body.isalpha()


def _has_key(text: str, start: int, end: int) -> bool:
    """A block with a line of a key, or with an end and no words inside; not a page that speaks of keys."""
    block = text[start:end]
    if re.search(r"(?=[A-Za-z+/]{0,40}\d)[A-Za-z0-9+/=]{24}", block):
        return True
    body = block.partition("KEY")[2].partition("-----END")[0]
    return "-----END" in block and len(body) > 12 and re.search(r"[a-z] [a-z]", body) is None


def _is_generated(text: str, start: int, end: int) -> bool:
    """Both cases, at least three digits and no words in a row: a hash has one case, a name has words."""
    value = text[start:end]
    digits = sum(c.isdigit() for c in value)
    mixed = any(c.islower() for c in value) and any(c.isupper() for c in value)
    front = text[max(0, start - 12) : start]
    if CHECKSUM_NAME.search(front) or ID_NAME.search(front):
        return False
    return mixed and digits >= 3 and len(set(value)) >= 16 and RUN_OF_LETTERS.search(value) is None


def _block(title: str, marker: str, pattern: str) -> Rule:
    shown = "[SECRET:private-key]"
    return Rule("private-key", title, shown, re.compile(pattern), (marker,), tried="at-marker", holds=_has_key)


SECRET_RULES: tuple[Rule, ...] = (
    _block("private key", "-----BEGIN ", PEM),
    _block("PuTTY private key", "PuTTY-User-Key-File-", PUTTY),
    *(_secret(*one, tried="at-marker") for one in PREFIXED),
    *(_secret(*one, tried="anywhere") for one in INSIDE),
    *(_secret(*one, tried="anywhere", group=1) for one in PLACED),
)
ENCODED = r"(?<![\w+/=-])([A-Za-z0-9+/]{20,2000}+={0,2})(?![\w+/=])"
NAMED_SECRET = re.compile(rb"(?i)(?:pass|pwd|secret|token|key)[\w-]{0,20}[\"']?\s{0,2}[=:]\s{0,2}\S{6}")


def _is_encoded(text: str, start: int, end: int) -> bool:
    """Base64 of a line that names a secret, as in a config map: DB_PASSWORD=..."""
    try:
        plain = base64.b64decode(text[start:end], validate=True)
    except ValueError:
        return False
    return (
        NAMED_SECRET.search(plain) is not None and plain.isascii() and plain.decode().replace("\n", " ").isprintable()
    )


# Behind all others: they know more about what they find.
LAST_RULES: tuple[Rule, ...] = (
    Rule(
        "token",
        "access token",
        "[SECRET:token]",
        re.compile(NAMED_TOKEN, re.ASCII),
        gate="mixed-word",
        group=1,
        holds=_is_generated,
    ),
    Rule(
        "encoded",
        "encoded secret",
        "[SECRET:encoded]",
        re.compile(ENCODED, re.ASCII),
        gate="long-word",
        group=1,
        holds=_is_encoded,
    ),
)
