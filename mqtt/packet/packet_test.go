package packet

import (
	"bytes"
	"slices"
	"testing"
)

// The bytes are those of the standards: MQTT 3.1.1 and 5.0, chapter 3.
func TestPacketsAreThoseOfTheStandards(t *testing.T) {
	for name, c := range map[string]struct{ got, want []byte }{
		"CONNECT 3.1.1": {
			AppendConnect(nil, Hello{Version: V311, ClientID: "d1", KeepAlive: 60}),
			append([]byte{0x10, 14, 0, 4}, "MQTT\x04\x02\x00\x3c\x00\x02d1"...),
		},
		"CONNECT 5.0": {
			AppendConnect(nil, Hello{Version: V5, ClientID: "d1", Resume: true, Expiry: 3600, Redirect: true}),
			append([]byte{0x10, 39, 0, 4}, "MQTT\x05\x00\x00\x00\x18\x11\x00\x00\x0e\x10\x26\x00\x0dsrtm-redirect\x00\x011\x00\x02d1"...),
		},
		"PUBLISH 3.1.1":   {AppendPublish(nil, V311, "a/b", 10, []byte("x")), []byte("\x32\x08\x00\x03a/b\x00\x0ax")},
		"PUBLISH 5.0":     {AppendPublish(nil, V5, "a/b", 10, []byte("x")), []byte("\x32\x09\x00\x03a/b\x00\x0a\x00x")},
		"SUBSCRIBE 3.1.1": {AppendSubscribe(nil, V311, 1, "a/#"), []byte("\x82\x08\x00\x01\x00\x03a/#\x01")},
		"SUBSCRIBE 5.0":   {AppendSubscribe(nil, V5, 1, "a/#"), []byte("\x82\x09\x00\x01\x00\x00\x03a/#\x01")},
		"PUBACK":          {AppendPuback(nil, 0x1234), []byte{0x40, 2, 0x12, 0x34}},
		"PINGREQ":         {Append(nil, PingRequest, nil), []byte{0xC0, 0}},
	} {
		if !bytes.Equal(c.got, c.want) {
			t.Errorf("%s: %q, want %q", name, c.got, c.want)
		}
	}
}

func TestAnswersAreParsed(t *testing.T) {
	if e, err := ParseConnack(V311, []byte{0, 0}); err != nil || e.Reason != 0 || e.Maximum != 65535 {
		t.Errorf("CONNACK 3.1.1: %+v, %v", e, err)
	}
	// Receive Maximum 10, Maximum QoS 1, a user property, an assigned client id.
	body := []byte("\x01\x00\x14\x21\x00\x0a\x24\x01\x26\x00\x01k\x00\x01v\x12\x00\x03abc\x28\x01")
	if e, err := ParseConnack(V5, body); err != nil || e.Maximum != 10 || e.Reference != "" {
		t.Errorf("CONNACK 5.0: %+v, %v", e, err)
	}
	if e, err := ParseConnack(V5, []byte("\x00\x9c\x06\x1c\x00\x03h:1")); err != nil || e.Reason != 0x9c || e.Reference != "h:1" {
		t.Errorf("CONNACK with a server reference: %+v, %v", e, err)
	}
	if e, err := ParseDisconnect([]byte("\x9d\x06\x1c\x00\x03h:2")); err != nil || e.Reason != 0x9d || e.Reference != "h:2" {
		t.Errorf("DISCONNECT: %+v, %v", e, err)
	}
	if id, reason, err := ParsePuback([]byte{1, 2, 0x97, 0}); err != nil || id != 0x102 || reason != 0x97 {
		t.Errorf("PUBACK: %d, %#x, %v", id, reason, err)
	}
	for _, version := range []byte{V311, V5} {
		in := AppendPublish(nil, version, "a/b", 7, bytes.Repeat([]byte("m"), 300))
		kind, body, n, err := Parse(in, len(in))
		if err != nil || kind != Publish|2 || n != len(in) {
			t.Fatalf("version %d: kind %#x, %d bytes, %v", version, kind, n, err)
		}
		if topic, payload, id, err := ParseDelivery(version, body); err != nil || string(topic) != "a/b" || id != 7 || len(payload) != 300 {
			t.Errorf("version %d: %q, %d, %d bytes, %v", version, topic, id, len(payload), err)
		}
		if _, _, _, err := Parse(in, len(in)-1); err == nil {
			t.Errorf("version %d: a packet above the limit is no error", version)
		}
	}
}

// FuzzParse parses a broker's bytes, whole and split at every byte.
func FuzzParse(f *testing.F) {
	f.Add([]byte("\x20\x02\x00\x00\x40\x02\x00\x01"))
	f.Add([]byte("\x20\x06\x00\x00\x03\x21\x00\x0a\x32\x09\x00\x03a/b\x00\x0a\x00x"))
	f.Add([]byte("\xe0\x08\x9d\x06\x1c\x00\x03h:2"))
	f.Add([]byte("\xd0\xff\xff\xff\xff\x01"))
	f.Fuzz(func(t *testing.T, in []byte) {
		const limit = 1 << 16
		walk := func(in []byte) (kinds []byte, rest []byte, err error) {
			for {
				kind, body, n, err := Parse(in, limit)
				if err != nil || n == 0 {
					return kinds, in, err
				}
				for _, version := range []byte{V311, V5} {
					_, _, _, _ = ParseDelivery(version, body)
					_, _ = ParseConnack(version, body)
				}
				_, _ = ParseDisconnect(body)
				_, _, _ = ParsePuback(body)
				kinds, in = append(kinds, byte(kind)), in[n:]
			}
		}
		whole, _, failed := walk(in)
		var split, rest []byte
		var err error
		for i := 0; i < len(in) && err == nil; i++ {
			var kinds []byte
			kinds, rest, err = walk(append(slices.Clone(rest), in[i]))
			split = append(split, kinds...)
		}
		if !bytes.Equal(whole, split) || (failed == nil) != (err == nil) {
			t.Errorf("whole %x %v, split %x %v", whole, failed, split, err)
		}
	})
}
