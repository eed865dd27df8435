// Package nsqhttp is the message part of NSQ's HTTP API: /pub, /mpub and their refusals.
// Brokers and the gateway use it, so their answers are the same. It does not know where
// messages go.
package nsqhttp

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/srtm-io/srtm/nsq/wire"
)

// Fault is a refusal in the form of NSQ's tools: {"message": "CODE"}. Detail is our
// extension, for people.
type Fault struct {
	Status  int    `json:"-"`
	Message string `json:"message"`
	Detail  string `json:"detail,omitempty"`
	// RetryAfter is the time until a retry makes sense; 0: unknown.
	RetryAfter time.Duration `json:"-"`
}

func (f *Fault) Error() string { return f.Message + ": " + f.Detail }

// Refuse returns a Fault.
func Refuse(status int, message, format string, args ...any) error {
	return &Fault{Status: status, Message: message, Detail: fmt.Sprintf(format, args...)}
}

// BadRequest is Refuse with 400.
func BadRequest(message, format string, args ...any) error {
	return Refuse(http.StatusBadRequest, message, format, args...)
}

// TooLarge is Refuse with 413.
func TooLarge(message, format string, args ...any) error {
	return Refuse(http.StatusRequestEntityTooLarge, message, format, args...)
}

// QuotaExceeded returns the refusal for a tenant whose messages admission denies.
func QuotaExceeded(tenant string, messages int, retryAfter time.Duration) error {
	return &Fault{
		Status: http.StatusTooManyRequests, Message: "QUOTA_EXCEEDED", RetryAfter: retryAfter,
		Detail: fmt.Sprintf("tenant %q may not publish %d messages now", tenant, messages),
	}
}

// refusals maps a broker's error codes over TCP to HTTP refusals.
var refusals = map[wire.ErrorCode]Fault{
	wire.CodeRateLimited:  {Status: http.StatusTooManyRequests, Message: "RATE_LIMITED"},
	wire.CodeQueueFull:    {Status: http.StatusServiceUnavailable, Message: "QUEUE_FULL"},
	wire.CodeBadTopic:     {Status: http.StatusBadRequest, Message: "INVALID_TOPIC"},
	wire.CodeBadMessage:   {Status: http.StatusRequestEntityTooLarge, Message: "MSG_TOO_BIG"},
	wire.CodeBadBody:      {Status: http.StatusRequestEntityTooLarge, Message: "BODY_TOO_BIG"},
	wire.CodeAuthFirst:    {Status: http.StatusUnauthorized, Message: "AUTH_FIRST"},
	wire.CodeAuthFailed:   {Status: http.StatusServiceUnavailable, Message: "AUTH_FAILED"},
	wire.CodeUnauthorized: {Status: http.StatusForbidden, Message: "UNAUTHORIZED"},
}

// Refused returns the HTTP refusal for a broker's refusal over TCP.
func Refused(code wire.ErrorCode, detail string) *Fault {
	f, known := refusals[code]
	if !known {
		f = Fault{Status: http.StatusServiceUnavailable, Message: "PUB_FAILED"}
	}
	f.Detail = detail
	return &f
}

// Write answers with the fault.
func (f *Fault) Write(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	if f.Status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	if f.RetryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(f.RetryAfter.Seconds()))))
	}
	w.WriteHeader(f.Status)
	_ = json.NewEncoder(w).Encode(f) // an error means that the client has left, because a fault always encodes
}

// WriteText answers a successful request.
func WriteText(w http.ResponseWriter, body string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = io.WriteString(w, body) // the client has left
}

// Argument returns a value of the query, or a fault if the query has none. An empty value
// counts.
func Argument(q url.Values, name, missing string) (string, error) {
	if !q.Has(name) {
		return "", BadRequest(missing, "the query has no %s", name)
	}
	return q.Get(name), nil
}

// TopicArgument returns the request's topic. If the name is invalid, the fault has the
// code invalid.
func TopicArgument(q url.Values, invalid string) (string, error) {
	name, err := Argument(q, "topic", "MISSING_ARG_TOPIC")
	if err == nil && !wire.ValidTopicName(name) {
		err = BadRequest(invalid, "topic %q is not a valid name", name)
	}
	return name, err
}

// delay returns the value of defer=<ms>, or 0 if the query has none.
func delay(q url.Values, limits wire.Limits) (time.Duration, error) {
	if !q.Has("defer") {
		return 0, nil
	}
	most := limits.MaxDefer().Milliseconds()
	ms, err := strconv.ParseInt(q.Get("defer"), 10, 64)
	if err != nil || ms < 0 || ms > most {
		return 0, BadRequest("INVALID_DEFER", "defer %q is not a number of milliseconds in [0, %d]", q.Get("defer"), most)
	}
	return time.Duration(ms) * time.Millisecond, nil
}

// plain returns a fault if the request's body is encoded. Consumers receive no header
// that names the encoding.
func plain(r *http.Request) error {
	for _, coding := range r.Header.Values("Content-Encoding") {
		if coding != "" && !strings.EqualFold(coding, "identity") {
			return Refuse(http.StatusUnsupportedMediaType, "ENCODING_NOT_SUPPORTED",
				"Content-Encoding %.40q: messages are stored as they come; send the body without Content-Encoding, or decode it in the consumer and leave the header out", coding)
		}
	}
	return nil
}

// ReadPub reads a request to /pub. The body is one message, and defer=<ms> defers it.
func ReadPub(r *http.Request, limits wire.Limits) (topic string, body []byte, wait time.Duration, err error) {
	q := r.URL.Query()
	if err = plain(r); err != nil {
		return "", nil, 0, err
	}
	if body, err = ReadBody(r, limits.MaxMessageSize, "MSG_TOO_BIG"); err != nil {
		return "", nil, 0, err
	}
	if len(body) == 0 {
		return "", nil, 0, BadRequest("MSG_EMPTY", "the message has no body")
	}
	if topic, err = TopicArgument(q, "INVALID_TOPIC"); err != nil {
		return "", nil, 0, err
	}
	wait, err = delay(q, limits)
	return topic, body, wait, err
}

// Messages are the messages of a batch, as views into a request's body.
type Messages interface {
	Len() int
	Bytes() int // total
	Each(func(body []byte))
}

// isBinary reports whether a request to /mpub has the parameter binary with a value other
// than false and 0. NSQ's nsqd takes every other value, including an empty value, for
// true.
func isBinary(q url.Values) bool {
	return q.Has("binary") && q.Get("binary") != "false" && q.Get("binary") != "0"
}

// ReadMpub reads a request to /mpub. The body has one message per line. With binary=true
// the body is the body of an MPUB.
func ReadMpub(r *http.Request, limits wire.Limits) (topic string, batch Messages, wait time.Duration, err error) {
	q := r.URL.Query()
	if err = plain(r); err != nil {
		return "", nil, 0, err
	}
	body, err := ReadBody(r, limits.MaxBodySize, "BODY_TOO_BIG")
	if err != nil {
		return "", nil, 0, err
	}
	if topic, err = TopicArgument(q, "INVALID_TOPIC"); err != nil {
		return "", nil, 0, err
	}
	if wait, err = delay(q, limits); err != nil {
		return "", nil, 0, err
	}
	if isBinary(q) {
		batch, err = binaryBatch(body, limits)
	} else {
		batch, err = splitLines(body, limits.MaxMessageSize)
	}
	return topic, batch, wait, err
}

// ReadBody reads at most limit bytes of a request's body.
func ReadBody(r *http.Request, limit int, tooBig string) ([]byte, error) {
	if r.ContentLength > int64(limit) {
		return nil, TooLarge(tooBig, "%d bytes are more than %d", r.ContentLength, limit)
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, int64(limit)+1))
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil, Refuse(http.StatusRequestTimeout, "BODY_TIMEOUT", "%d bytes came in time", len(body))
	}
	if errors.As(err, new(*Fault)) {
		return nil, err
	}
	if err != nil {
		return nil, BadRequest("BODY_UNREADABLE", "%v", err)
	}
	if len(body) > limit {
		return nil, TooLarge(tooBig, "more than %d bytes", limit)
	}
	return body, nil
}

// binaryBatch parses the body of an MPUB. Refusals have the same codes as over TCP.
func binaryBatch(body []byte, limits wire.Limits) (wire.Batch, error) {
	batch, err := wire.ParseBatch(body, limits)
	var fault *wire.Error
	if errors.As(err, &fault) {
		return batch, TooLarge(strings.TrimPrefix(string(fault.Code), "E_"), "%s", fault.Text)
	}
	return batch, nil
}

// lines are the messages of a text body, as a view. A list of one-byte lines would take
// many times the body's memory.
type lines struct {
	body  []byte
	n     int // lines that are not empty
	bytes int // total of these lines
}

func (l lines) Len() int { return l.n }

func (l lines) Bytes() int { return l.bytes }

func (l lines) Each(f func(body []byte)) {
	for rest := l.body; len(rest) > 0; {
		var line []byte
		if line, rest, _ = bytes.Cut(rest, newline); len(line) > 0 {
			f(line)
		}
	}
}

var newline = []byte{'\n'}

// splitLines takes each nonempty line as a message.
func splitLines(body []byte, maxMessage int) (lines, error) {
	l := lines{body: body}
	var err error
	l.Each(func(line []byte) {
		l.n++
		l.bytes += len(line)
		if len(line) > maxMessage && err == nil {
			err = TooLarge("MSG_TOO_BIG", "message %d of %d bytes is longer than %d", l.n, len(line), maxMessage)
		}
	})
	return l, err
}
