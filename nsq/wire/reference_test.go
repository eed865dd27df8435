package wire

import (
	"encoding/binary"
	"fmt"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// commandDiff compares by content, messages of a batch included. "" is equal.
func commandDiff(got, want Command) string {
	a, b := fieldsOf(got), fieldsOf(want)
	if reflect.DeepEqual(a, b) {
		return ""
	}
	return fmt.Sprintf("got %+v, want %+v", a, b)
}

type commandFields struct {
	verb                 string
	topic, channel, body string
	messages             []string
	delay                time.Duration
	ready                int
	id                   string
}

func fieldsOf(c Command) commandFields {
	f := commandFields{
		verb: c.Verb.String(), topic: string(c.Topic), channel: string(c.Channel),
		body: string(c.Body), delay: c.Delay, ready: c.Ready, id: c.ID.String(),
	}
	c.Batch.Each(func(b []byte) { f.messages = append(f.messages, string(b)) })
	return f
}

// reference is ParseCommand in its simplest form. It copies everything, uses regular expressions, and knows nothing of
// buffers. It returns the fields and the length of a whole command, or an error code, or 0 and "" for "more".
func reference(in []byte, lim Limits) (f commandFields, n int, code ErrorCode) {
	line, rest, ended := strings.Cut(string(in), "\n")
	if !ended || len(line) >= MaxLine {
		if len(in) >= MaxLine {
			return f, 0, CodeInvalid
		}
		return f, 0, ""
	}
	n = len(line) + 1
	words := strings.Split(strings.TrimSuffix(line, "\r"), " ")
	arity := map[string]int{"IDENTIFY": 0, "AUTH": 0, "PUB": 1, "MPUB": 1, "DPUB": 2, "SUB": 2,
		"RDY": 1, "FIN": 1, "REQ": 2, "TOUCH": 1, "NOP": 0, "CLS": 0}
	if line == "RDY" || line == "RDY\r" {
		words = append(words, "1")
	}
	want, known := arity[words[0]]
	if !known || len(words) < want+1 {
		return f, 0, CodeInvalid
	}
	words = words[:want+1] // further words are ignored
	f.id = string(make([]byte, 16))
	f.verb = words[0]
	switch f.verb {
	case "NOP", "CLS":
		return f, n, ""
	case "FIN", "TOUCH", "REQ":
		if f.id = words[1]; len(f.id) != 16 {
			return f, 0, CodeInvalid
		}
		if f.verb == "REQ" {
			ms, ok := referenceInt(words[2])
			if !ok {
				return f, 0, CodeInvalid
			}
			ms = min(max(ms, 0), lim.MaxReqTimeout.Milliseconds())
			f.delay = time.Duration(ms) * time.Millisecond
		}
		return f, n, ""
	case "RDY":
		count, ok := referenceInt(words[1])
		if !ok || count < 0 || count > int64(lim.MaxRdy) {
			return f, 0, CodeInvalid
		}
		f.ready = int(count)
		return f, n, ""
	case "SUB":
		if f.topic = words[1]; !referenceName(f.topic) {
			return f, 0, CodeBadTopic
		}
		if f.channel = words[2]; !referenceName(f.channel) {
			return f, 0, CodeBadChannel
		}
		return f, n, ""
	}

	limit, badSize := lim.MaxBodySize, CodeBadBody
	switch f.verb {
	case "DPUB":
		most := lim.MaxDeferTimeout
		if most == 0 {
			most = lim.MaxReqTimeout
		}
		ms, ok := referenceInt(words[2])
		if !ok || ms < 0 || ms > most.Milliseconds() {
			return f, 0, CodeInvalid
		}
		f.delay = time.Duration(ms) * time.Millisecond
		limit, badSize = lim.MaxMessageSize, CodeBadMessage
	case "PUB":
		limit, badSize = lim.MaxMessageSize, CodeBadMessage
	}
	if len(words) > 1 {
		if f.topic = words[1]; !referenceName(f.topic) {
			return f, 0, CodeBadTopic
		}
	}
	if f.verb == "MPUB" {
		taken := 0
		f.messages, taken, code = referenceBatch(rest, lim)
		if taken == 0 {
			return f, 0, code
		}
		return f, n + taken, ""
	}
	body, fits, whole := referenceSized(&rest, limit)
	switch {
	case !fits:
		return f, 0, badSize
	case !whole:
		return f, 0, ""
	}
	f.body = body
	return f, n + 4 + len(body), ""
}

// referenceBatch adds up the messages' sizes, whatever total size is given.
func referenceBatch(rest string, lim Limits) (messages []string, n int, code ErrorCode) {
	number := func() int64 {
		v := int64(binary.BigEndian.Uint32([]byte(rest)))
		rest = rest[4:]
		return v
	}
	if len(rest) < 4 {
		return nil, 0, ""
	}
	if declared := number(); declared < 1 || declared > int64(lim.MaxBodySize) {
		return nil, 0, CodeBadBody
	}
	if len(rest) < 4 {
		return nil, 0, ""
	}
	count := number()
	if count < 1 || 4+5*count > int64(lim.MaxBodySize) {
		return nil, 0, CodeBadBody
	}
	body := int64(4)
	for left := count; left > 0; left-- {
		if int64(len(rest)) < 4*left {
			return nil, 0, ""
		}
		size := number()
		if size < 1 || size > int64(lim.MaxMessageSize) {
			return nil, 0, CodeBadMessage
		}
		if body += 4 + size; body+5*(left-1) > int64(lim.MaxBodySize) {
			return nil, 0, CodeBadBody
		}
		if int64(len(rest)) < size {
			return nil, 0, ""
		}
		messages, rest = append(messages, rest[:size]), rest[size:]
	}
	return messages, 4 + int(body), ""
}

func referenceSized(s *string, limit int) (body string, fits, whole bool) {
	if len(*s) < 4 {
		return "", true, false
	}
	size := int64(binary.BigEndian.Uint32([]byte(*s)))
	if size < 1 || size > int64(limit) {
		return "", false, false
	}
	if int64(len(*s)) < 4+size {
		return "", true, false
	}
	body, *s = (*s)[4:4+size], (*s)[4+size:]
	return body, true, true
}

var (
	nameForm = regexp.MustCompile(`^[.a-zA-Z0-9_-]+(#ephemeral)?$`) // the client libraries' expression
	intForm  = regexp.MustCompile(`^-?[0-9]{1,18}$`)
)

func referenceName(s string) bool {
	return len(s) <= 64 && nameForm.MatchString(s) && !strings.HasSuffix(s, "\n")
}

func referenceInt(s string) (int64, bool) {
	if !intForm.MatchString(s) {
		return 0, false
	}
	v, err := strconv.ParseInt(s, 10, 64)
	return v, err == nil
}
