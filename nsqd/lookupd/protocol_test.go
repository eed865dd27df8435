package lookupd

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestIdentifyGolden(t *testing.T) {
	got, err := appendIdentify([]byte(magic), Node{BroadcastAddress: "b", Hostname: "h", HTTPPort: 4151, TCPPort: 4150, Version: "v"})
	testkit.Must(t, err)
	body := `{"broadcast_address":"b","hostname":"h","http_port":4151,"tcp_port":4150,"version":"v"}`
	if want := "  V1IDENTIFY\n\x00\x00\x00\x57" + body; string(got) != want {
		t.Errorf("%q\nwant %q", got, want)
	}
}

// For any change, the commands lead from the registered topics to the current topics, and a topic is registered whenever
// one of its channels is registered.
func TestChangesLeadToWhatThereIs(t *testing.T) {
	topics := rapid.Custom(func(t *rapid.T) []Topic {
		names := rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"a", "b", "a.b", "a-b", "c#ephemeral"}), 0, 5, rapid.ID[string]).Draw(t, "topics")
		all := make([]Topic, len(names))
		for i, name := range names {
			all[i] = Topic{name, rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"x", "y", "z"}), 0, 3, rapid.ID[string]).Draw(t, "channels")}
		}
		return all
	})
	rapid.Check(t, func(t *rapid.T) {
		have, want := keysOf(topics.Draw(t, "have")), keysOf(topics.Draw(t, "want"))
		now := make(map[string]bool)
		name := func(k key) string { return strings.TrimSpace(string(k.append(nil, ""))) }
		for k := range have {
			now[name(k)] = true
		}
		commands := changes(have, want)
		for _, c := range commands {
			verb, args, _ := strings.Cut(strings.TrimSuffix(string(c), "\n"), " ")
			topic, _, isChannel := strings.Cut(args, " ")
			testkit.MustEqual(t, now[args], verb == "UNREGISTER", "%q, though that is so already", c)
			now[args] = verb == "REGISTER"
			if verb == "REGISTER" && isChannel && !now[topic] {
				t.Fatalf("%q before its topic", c)
			}
			if verb == "UNREGISTER" && !isChannel {
				for other, there := range now {
					if there && strings.HasPrefix(other, topic+" ") {
						t.Fatalf("%q before its channel %q", c, other)
					}
				}
			}
		}
		for k := range want {
			if !now[name(k)] {
				t.Fatalf("%v is not registered", k)
			}
			delete(now, name(k))
		}
		for k, there := range now {
			if there {
				t.Fatalf("%v is still registered", k)
			}
		}
		again := changes(have, want)
		if !bytes.Equal(bytes.Join(commands, nil), bytes.Join(again, nil)) {
			t.Fatal("the order is not fixed")
		}
	})
}

func FuzzAnswers(f *testing.F) {
	answer := func(s string) []byte {
		return append(binary.BigEndian.AppendUint32(nil, uint32(len(s))), s...)
	}
	f.Add(answer("OK"))
	f.Add(answer("E_INVALID cannot"))
	f.Add(answer(`{"tcp_port":4160,"http_port":4161,"version":"1.3.0","broadcast_address":"b","hostname":"h"}`))
	f.Add(answer(`{"channels":["a","b"]}`))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 'x'})
	f.Add([]byte{0, 0})
	f.Fuzz(func(t *testing.T, in []byte) {
		r := bytes.NewReader(in)
		for {
			before := r.Len()
			a, err := readAnswer(r)
			if err != nil {
				if a != nil {
					t.Fatal("an answer and an error")
				}
				if errors.Is(err, io.EOF) && before != 0 {
					t.Fatal("an end in the middle of an answer is taken for one between two")
				}
				return
			}
			if before-r.Len() != 4+len(a) || len(a) > maxAnswer {
				t.Fatalf("%d bytes read for an answer of %d", before-r.Len(), len(a))
			}
			if (expectOK(a) == nil) != (string(a) == "OK") {
				t.Fatalf("%q", a)
			}
			if id, err := parseIdentity(a); err != nil && id != (identity{}) {
				t.Fatalf("%+v and %v", id, err)
			}
			if c, err := parseChannels(a); err != nil && c != nil {
				t.Fatalf("%v and %v", c, err)
			}
		}
	})
}
