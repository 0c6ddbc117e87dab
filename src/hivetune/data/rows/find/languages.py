"""What people of other languages call a column, a speaker or a list of turns, as the English word of names.py; and what
they call it in a hurry: `ans`, `quesiton`, `raw_anwser`.
"""

from functools import lru_cache
from typing import Final

from hivetune.data.pieces.said import names

# As plain_name writes them, `câu_hỏi` for "Câu hỏi". A word that means something else in another language is left out.
_SAME: Final = {
    "question": "pregunta preguntas pergunta perguntas domanda domande frage fragen vraag vragen pytanie "
    "pytania fråga frågor spørgsmål spørsmål kysymys вопрос вопросы питання otázka otázky kérdés întrebare "
    "soru sorular ερώτηση câu_hỏi cau_hoi คำถาม คําถาม pertanyaan soalan 質問 问题 問題 问 問 질문 سؤال السؤال س שאלה "
    "प्रश्न सवाल প্রশ্ন swali ikibazo ques",
    "answer": "ans resp respuesta respuestas resposta respostas risposta risposte antwort antworten antwoord "
    "antwoorden réponse réponses reponse reponses odpowiedź odpowiedz odpowiedzi svar vastaus ответ ответы "
    "відповідь odpověď odpoveď válasz răspuns raspuns cevap cevaplar yanıt yanit απάντηση trả_lời tra_loi "
    "câu_trả_lời cau_tra_loi đáp_án คำตอบ คําตอบ jawaban 回答 答案 答え 答 응답 답변 대답 جواب الجواب إجابة الإجابة ج "
    "תשובה उत्तर जवाब উত্তর jibu igisubizo 応答 应答 回应 回應 回复 回覆 答复 答覆",
    "user": "usuario usuaria usuário utente utilisateur utilisatrice benutzer nutzer gebruiker użytkownik "
    "användare bruger bruker käyttäjä пользователь юзер користувач uživatel felhasználó utilizator kullanıcı "
    "kullanici người_dùng nguoi_dung ผู้ใช้ pengguna ユーザー ユーザ 使用者 사용자 유저 مستخدم المستخدم משתמש उपयोगकर्ता",
    "customer": "cliente kunde kundin клиент клієнт klient klant zákazník pelanggan müşteri musteri "
    "khách_hàng khach_hang ลูกค้า 顧客 顾客 お客様 고객 العميل",
    "assistant": "asistente assistente asistent assistent asystent ассистент помощник помічник asistan "
    "asisten trợ_lý tro_ly ผู้ช่วย アシスタント 어시스턴트 مساعد المساعد עוזר सहायक",
    "bot": "бот robô ボット 봇 บอท 机器人",
    "message": "mensagem mensagens mensaje mensajes messaggio messaggi nachricht wiadomość wiadomosc "
    "meddelande сообщение повідомлення zpráva üzenet mesaj μήνυμα tin_nhắn tin_nhan ข้อความ pesan メッセージ 消息 訊息 "
    "메시지 رسالة הודעה",
    "content": "conteúdo conteudo contenido contenuto inhalt contenu treść содержание nội_dung noi_dung "
    "เนื้อหา 内容 內容 내용 المحتوى",
    "text": "texto testo texte tekst текст văn_bản teks 文本 テキスト 텍스트 نص",
    "role": "rol papel ruolo rôle rolle роль vai_trò vai_tro บทบาท peran 角色 役割 역할",
    "sender": "remetente remitente emisor mittente absender expéditeur nadawca отправитель gönderen "
    "người_gửi nguoi_gui pengirim 发送者 送信者",
    "type": "tipo typ тип loại",
    "author": "autor autore auteur автор",
    "conversation": "conversa conversas conversación conversacion conversaciones conversazione "
    "conversazioni gespräch rozmowa диалог диалоги разговор hội_thoại hoi_thoai การสนทนา percakapan 对话 對話 会話 "
    "대화 محادثة",
    "history": "historial histórico historico cronologia verlauf historique история lịch_sử lich_su riwayat 历史 履歴",
    "context": "ctx contexto kontext contesto contexte kontekst контекст ngữ_cảnh konteks 上下文 文脈",
    "category": "categoria categoría kategorie kategoria категория категорія danh_mục kategori หมวดหมู่ 类别 "
    "分类 カテゴリ 카테고리",
    "system": "sistema système система",
    "input": "entrada eingabe entrée 输入 入力 입력",
    "output": "salida saída saida ausgabe sortie 输出 出力 출력",
    "instruction": "instruct instr inst instrucción instruccion instrução instrucao anweisung istruzione instrukcja "
    "инструкция 指令 指示 지시 명령 명령어 talimat komut",
    "explanation": "exp explicación explicacion explicação explicacao erklärung spiegazione explication "
    "объяснение 解析 解释 解説",
    "expected": "esperada esperado esperadas attendu attendue erwartet erwartete oczekiwana ожидаемый 期望 参考 標準 "
    "标准",
    "model": "modelo modèle modell modello",
    "options": "opciones opções alternativas 选项 選択肢 варианты",
}
_ENGLISH: Final = {word: name for name, words in _SAME.items() for word in words.split()}


def in_english(name: str) -> str:
    """The English word for a plain name of another language; any other name as it is."""
    return _ENGLISH.get(name) or _misspelt(name) or name


@lru_cache(4096)
def _misspelt(name: str) -> str | None:
    """The English word that differs from a name by one slip: a letter too few or too many, or two that swapped."""
    if len(name) < MIN_MISSPELT or name in _SPELT:
        return None
    return next((word for word in _SPELT if abs(len(word) - len(name)) <= 1 and _is_slip(name, word)), None)


def _is_slip(name: str, word: str) -> bool:
    at = next((i for i, (one, other) in enumerate(zip(name, word, strict=False)) if one != other), -1)
    if at < 1:
        return False  # another word, or with an ending
    mine, theirs = name[at:], word[at:]
    return mine[1:] == theirs or mine == theirs[1:] or (mine[:2] == theirs[1::-1] and mine[2:] == theirs[2:])


# Words that are recognized with one slip in them; an ending (`answered`) makes another word of them.
_SPELT: Final = (
    *("question", "questions", "answer", "answers", "response", "responses"),
    *("instruction", "instructions", "completion"),
)
MIN_MISSPELT = 5

# As columns of translations are called. Codes that are words of names (id, is, it, no, to, as, or, he, am ...) are left
# out.
_CODES = names(
    "en de fr es pt ro ru zh ja ko ar hi vi th tr pl nl sv da fi cs hu el uk bg sr hr sk sl lt lv et fa ur bn ta te mr "
    "gu kn ml pa ne si km lo mn sw yo ig ha zu xh af sq hy ka kk uz az eu ca gl ga cy mt eng deu ger fra fre spa por "
    "rus zho chi cmn jpn kor ara hin vie tha tur pol nld swe dan fin ces hun ell ukr ron rum ben tam tel mar guj kan "
    "mal pan nep sin khm mon swa yor ibo hau zul xho afr ind ita cn jp kr vn"
)
_NAMES = names(
    "english german french spanish portuguese italian romanian russian chinese mandarin cantonese japanese korean "
    "arabic hindi vietnamese thai turkish polish dutch swedish danish norwegian finnish czech hungarian greek "
    "ukrainian bulgarian serbian croatian slovak slovenian lithuanian latvian estonian persian farsi urdu bengali "
    "bangla tamil telugu marathi gujarati kannada malayalam punjabi nepali sinhala khmer lao mongolian swahili yoruba "
    "igbo hausa zulu xhosa afrikaans albanian armenian georgian kazakh uzbek azerbaijani basque catalan galician irish "
    "welsh maltese indonesian malay tagalog filipino hebrew kinyarwanda luganda wolof twi shona somali amharic latin "
    "sanskrit esperanto hinglish 中文 英文 日文 韩文 中国語 英語 日本語 韓国語 한국어 영어 русский английский"
)
_TEXTS = names(
    "text texts sentence sentences sent word words phrase phrases translation latn hans hant cyrl arab xx cn tw"
)


def names_language(name: str) -> bool:
    """Whether a plain name is that of a language, or of a text in it: `en`, `german`, `english_sentence`, `zh_cn`."""
    first, *others = name.split("_")
    if others and first in _TEXTS:
        first, *others = [*others, first]
    return (first in _CODES or first in _NAMES) and set(others) <= _TEXTS
