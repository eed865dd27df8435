package names_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/mqtt/names"
)

func TestEnvelope(t *testing.T) {
	event := names.Event{
		Client: "truck 17", Series: 0xabc, Sequence: 7, Time: 1_700_000_000_123_000_000,
		Name: []byte(`fleet/"17"/x`), Payload: []byte(`{"t": 21.5}`),
	}
	testkit.Equal(t, string(names.AppendEnvelope(nil, &event)),
		`{"specversion":"1.0","type":"io.srtm.mqtt.publish","source":"/mqtt/truck%2017","id":"abc-7","time":"2023-11-14T22:13:20.123Z",`+
			`"subject":"fleet/\"17\"/x","datacontenttype":"application/json","data":{"t": 21.5}}`)
	event.Payload = []byte{0, 1, 2, 255}
	testkit.Equal(t, string(names.AppendEnvelope(nil, &event)),
		`{"specversion":"1.0","type":"io.srtm.mqtt.publish","source":"/mqtt/truck%2017","id":"abc-7","time":"2023-11-14T22:13:20.123Z",`+
			`"subject":"fleet/\"17\"/x","data_base64":"AAEC/w=="}`)
	event.Payload = nil
	testkit.Equal(t, string(names.AppendEnvelope(nil, &event)),
		`{"specversion":"1.0","type":"io.srtm.mqtt.publish","source":"/mqtt/truck%2017","id":"abc-7","time":"2023-11-14T22:13:20.123Z",`+
			`"subject":"fleet/\"17\"/x"}`)
}

// checkEnvelope compares an envelope with what a JSON parser reads from the envelope.
func checkEnvelope(t interface {
	Helper()
	Fatalf(string, ...any)
}, e names.Event,
) {
	t.Helper()
	encoded := names.AppendEnvelope([]byte("before"), &e)[len("before"):]
	if got := names.AppendPayload([]byte("before"), encoded); string(got) != "before"+string(e.Payload) {
		t.Fatalf("payload %q became %q in %s", e.Payload, got, encoded)
	}
	var decoded struct {
		Source, ID, Subject string
		Data                json.RawMessage
		Base64              []byte `json:"data_base64"`
	}
	if err := json.Unmarshal(encoded, &decoded); err != nil {
		t.Fatalf("%v: %s", err, encoded)
	}
	data := decoded.Base64
	if decoded.Data != nil {
		data = decoded.Data
	}
	if !bytes.Equal(bytes.TrimSpace(data), bytes.TrimSpace(e.Payload)) || decoded.Subject != string(e.Name) {
		t.Fatalf("%q in %s", e.Payload, encoded)
	}
}

func TestEnvelopeKeepsPayload(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		payload := rapid.SliceOf(rapid.Byte()).Draw(t, "payload")
		if rapid.Bool().Draw(t, "JSON") {
			payload, _ = json.Marshal(map[string]any{rapid.String().Draw(t, "key"): rapid.String().Draw(t, "value")})
		}
		checkEnvelope(t, names.Event{
			Client: rapid.String().Draw(t, "client"), Sequence: 1, Payload: payload,
			Name: []byte(rapid.SampledFrom([]string{`,"data":`, `x,`, `\`, `"`, "\x01\x7f", `,"data_base64":"`}).Draw(t, "name") + rapid.String().Draw(t, "more")),
		})
	})
}

func FuzzEnvelope(f *testing.F) {
	f.Add("c", []byte(`a/,"data":`), []byte(`{"data":1}`))
	f.Add("c", []byte(`,"data_base64":"`), []byte("\xff"))
	f.Add("c", []byte(`x`), []byte(" 1 "))
	f.Fuzz(func(t *testing.T, client string, name, payload []byte) {
		if names.CheckName(name) == nil && utf8.ValidString(client) {
			checkEnvelope(t, names.Event{Client: client, Name: name, Payload: payload})
		}
	})
}

func TestAppendPayloadKeepsOtherBodies(t *testing.T) {
	for _, body := range []string{"", "plain", `{"a":1}`, `{"x":1,"data_base64":"???"}`} {
		testkit.Equal(t, string(names.AppendPayload(nil, []byte(body))), body)
	}
}

func TestEnvelopeDoesNotAllocate(t *testing.T) {
	for _, payload := range []string{`{"temperature":21.5}`, strings.Repeat("\xff", 100)} {
		e := names.Event{Client: "truck-17", Name: []byte("fleet/truck-17/telemetry"), Payload: []byte(payload)}
		out, back := make([]byte, 0, 1024), make([]byte, 0, 1024)
		if got := testing.AllocsPerRun(100, func() {
			out = names.AppendEnvelope(out[:0], &e)
			back = names.AppendPayload(back[:0], out)
		}); got > 0 {
			t.Errorf("%v allocations", got)
		}
	}
}

func FuzzAttribute(f *testing.F) {
	f.Add([]byte("\x00a/b"))
	f.Add([]byte("\x0712345678a/b"))
	f.Add([]byte("\x02123"))
	f.Add([]byte("\x08\x05abcdename"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, encoded []byte) {
		a, ok := names.ParseAttribute(encoded)
		switch {
		case !ok && (a.Name != nil && len(a.Name) <= names.MaxName && len(encoded) < 1):
			t.Errorf("%q: %+v", encoded, a)
		case ok && a.Origin != 0 && !bytes.Equal(a.Append(nil), encoded):
			t.Errorf("%q became %q", encoded, a.Append(nil))
		}
	})
}

func TestAttribute(t *testing.T) {
	name := []byte(strings.Repeat("n", names.MaxName))
	for _, a := range []names.Attribute{
		{Name: name}, {Name: name, Envelope: true}, {Name: []byte("x"), Properties: []byte("properties")},
		{Name: []byte("x"), Origin: 7, Properties: make([]byte, 244)}, {Name: name, AtMostOnce: true, Origin: names.OriginOf("c")}, {Name: []byte("x"), Envelope: true, Origin: 1},
	} {
		encoded := a.Append(nil)
		got, ok := names.ParseAttribute(encoded)
		if !ok || string(got.Name) != string(a.Name) || got.Envelope != a.Envelope || got.AtMostOnce != a.AtMostOnce || got.Origin != a.Origin || string(got.Properties) != string(a.Properties) || len(encoded) > names.MaxAttribute {
			t.Errorf("%+v became %+v in %d bytes", a, got, len(encoded))
		}
	}
	for _, bad := range []string{"", "\x00", "\x10a", "\x08", "\x08\x02a", "\x08\x01a", "\x021234567", "\x02123456789"[:9], "\x00" + strings.Repeat("n", names.MaxName+1)} {
		if a, ok := names.ParseAttribute([]byte(bad)); ok {
			t.Errorf("%q is %+v", bad, a)
		}
	}
}
