package names

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"net/url"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/srtm-io/srtm/internal/mono"
)

// eventType is the type attribute of all envelopes.
const eventType = "io.srtm.mqtt.publish"

// Event is a message for a CloudEvents envelope (CloudEvents 1.0, JSON format). Client and id together
// are unique for each message.
type Event struct {
	Client   string    // client id; the source is /mqtt/CLIENT
	Series   uint64    // first part of the id: one connection of the client
	Sequence uint64    // second part of the id: number of the message on the connection
	Time     mono.Wall // time of the publish
	Name     []byte    // MQTT topic name, the subject
	Payload  []byte
}

// The data members are the last members, so that AppendPayload finds the payload without a JSON parser.
const (
	dataMember   = `,"data":`
	base64Member = `,"data_base64":"`
)

// standardBase64 is the value of base64.StdEncoding, which is a variable.
var standardBase64 = *base64.NewEncoding("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")

// AppendEnvelope appends the event's envelope. A payload that is JSON becomes the member data, byte for
// byte. Any other payload becomes data_base64.
func AppendEnvelope(dst []byte, e *Event) []byte {
	dst = append(dst, `{"specversion":"1.0","type":"`+eventType+`","source":"/mqtt/`...)
	dst = append(dst, url.PathEscape(e.Client)...)
	dst = append(dst, `","id":"`...)
	dst = strconv.AppendUint(dst, e.Series, 16)
	dst = append(dst, '-')
	dst = strconv.AppendUint(dst, e.Sequence, 10)
	dst = append(dst, `","time":"`...)
	dst = time.Unix(0, int64(e.Time)).UTC().AppendFormat(dst, time.RFC3339Nano)
	dst = append(dst, `","subject":`...)
	dst = appendString(dst, e.Name)
	switch {
	case len(e.Payload) == 0:
	case isJSON(e.Payload):
		dst = append(dst, `,"datacontenttype":"application/json"`+dataMember...)
		dst = append(dst, e.Payload...)
	default:
		dst = append(dst, base64Member...)
		encoding := standardBase64 // methods need a pointer, and pure packages share none
		dst = encoding.AppendEncode(dst, e.Payload)
		dst = append(dst, '"')
	}
	return append(dst, '}')
}

// isJSON reports whether a payload is JSON. A look at the first byte saves json.Valid most payloads that are
// not JSON, for which json.Valid allocates.
func isJSON(payload []byte) bool {
	return bytes.IndexByte([]byte("{[\"-0123456789tfn \t\r\n"), payload[0]) >= 0 && utf8.Valid(payload) && json.Valid(payload)
}

// AppendPayload appends the payload of an envelope made by AppendEnvelope. It appends any other body as
// the body is.
func AppendPayload(dst, envelope []byte) []byte {
	// A member's name cannot occur in a string before the member, because a string has no unescaped
	// quotation mark.
	if _, data, found := bytes.Cut(envelope, []byte(dataMember)); found {
		return append(dst, bytes.TrimSuffix(data, []byte("}"))...)
	}
	if _, data, found := bytes.Cut(envelope, []byte(base64Member)); found {
		encoding := standardBase64
		if decoded, err := encoding.AppendDecode(dst, bytes.TrimSuffix(data, []byte(`"}`))); err == nil {
			return decoded
		}
	} else if bytes.HasPrefix(envelope, []byte(`{"specversion":"1.0","type":"`+eventType+`"`)) {
		return dst // the payload is empty
	}
	return append(dst, envelope...)
}

// appendString appends text as a JSON string. Requires: text is UTF-8.
func appendString(dst, text []byte) []byte {
	dst = append(dst, '"')
	for _, c := range text {
		switch {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', c)
		case c < ' ':
			const digits = "0123456789abcdef"
			dst = append(dst, `\u00`...)
			dst = append(dst, digits[c>>4], digits[c&15])
		default:
			dst = append(dst, c)
		}
	}
	return append(dst, '"')
}
