package registry

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// identify returns an IDENTIFY command with a body.
func identify(body string) string {
	return "IDENTIFY\n" + string(binary.BigEndian.AppendUint32(nil, uint32(len(body)))) + body
}

const hello = `{"broadcast_address":"10.1.1.1","hostname":"h","http_port":4151,"tcp_port":4150,"version":"1.3.0"}`

func TestParse(t *testing.T) {
	node := Node{BroadcastAddress: "10.1.1.1", Hostname: "h", HTTPPort: 4151, TCPPort: 4150, Version: "1.3.0"}
	without := func(field string) string { return strings.Replace(hello, `"`+field+`":`, `"x":`, 1) }
	for _, c := range []struct {
		in   string
		want Command
		err  string
	}{
		{in: "PING\n", want: Command{Verb: Ping}},
		{in: "PING\r\n", want: Command{Verb: Ping}},
		{in: "PING a b\n", want: Command{Verb: Ping}},
		{in: " PING \n", want: Command{Verb: Ping}},
		{in: "REGISTER t\n", want: Command{Verb: Register, Topic: "t"}},
		{in: "REGISTER t \n", want: Command{Verb: Register, Topic: "t"}},
		{in: "REGISTER t c\n", want: Command{Verb: Register, Topic: "t", Channel: "c"}},
		{in: "REGISTER t c extra\n", want: Command{Verb: Register, Topic: "t", Channel: "c"}},
		{in: "REGISTER t  c\n", want: Command{Verb: Register, Topic: "t"}},
		{in: "UNREGISTER t#ephemeral c#ephemeral\n", want: Command{Verb: Unregister, Topic: "t#ephemeral", Channel: "c#ephemeral"}},
		{in: identify(hello), want: Command{Verb: Identify, Node: node}},
		{in: strings.Replace(identify(hello), "IDENTIFY", "IDENTIFY foo", 1), want: Command{Verb: Identify, Node: node}},
		{in: identify(without("hostname")), want: Command{Verb: Identify, Node: Node{BroadcastAddress: "10.1.1.1", HTTPPort: 4151, TCPPort: 4150, Version: "1.3.0"}}},
		{in: identify(strings.Replace(hello, "4151", "-1", 1)), want: Command{Verb: Identify, Node: Node{BroadcastAddress: "10.1.1.1", Hostname: "h", HTTPPort: -1, TCPPort: 4150, Version: "1.3.0"}}},

		{in: "\n", err: "E_INVALID invalid command "},
		{in: "ping\n", err: "E_INVALID invalid command ping"},
		{in: "FOO\xff\n", err: "E_INVALID invalid command FOO?"},
		{in: "REGISTER\n", err: "E_INVALID REGISTER insufficient number of params"},
		{in: "UNREGISTER\n", err: "E_INVALID UNREGISTER insufficient number of params"},
		{in: "REGISTER bad!topic\n", err: "E_BAD_TOPIC REGISTER topic name 'bad!topic' is not valid"},
		{in: "REGISTER  t\n", err: "E_BAD_TOPIC REGISTER topic name '' is not valid"},
		{in: "REGISTER #ephemeral\n", err: "E_BAD_TOPIC REGISTER topic name '#ephemeral' is not valid"},
		{in: "REGISTER t\tc\n", err: "E_BAD_TOPIC REGISTER topic name 't\tc' is not valid"},
		{in: "REGISTER " + strings.Repeat("x", 65) + "\n", err: "E_BAD_TOPIC"},
		{in: "UNREGISTER t bad!ch\n", err: "E_BAD_CHANNEL UNREGISTER channel name 'bad!ch' is not valid"},
		{in: strings.Repeat("x", MaxLine), err: "E_INVALID command is longer than 1024 bytes"},
		{in: identify("x{"), err: "E_BAD_BODY IDENTIFY failed to decode JSON body"},
		{in: identify("[]"), err: "E_BAD_BODY IDENTIFY failed to decode JSON body"},
		{in: identify(strings.Replace(hello, "4150", `"4150"`, 1)), err: "E_BAD_BODY IDENTIFY failed to decode JSON body"},
		{in: identify(without("broadcast_address")), err: "E_BAD_BODY IDENTIFY missing fields"},
		{in: identify(without("tcp_port")), err: "E_BAD_BODY IDENTIFY missing fields"},
		{in: identify(without("http_port")), err: "E_BAD_BODY IDENTIFY missing fields"},
		{in: identify(without("version")), err: "E_BAD_BODY IDENTIFY missing fields"},
		{in: identify(strings.Replace(hello, "4150", "70000", 1)), err: "E_BAD_BODY IDENTIFY port 70000 is outside -1 to 65535"},
		{in: identify(strings.Replace(hello, "1.3.0", strings.Repeat("x", MaxField+1), 1)), err: "E_BAD_BODY IDENTIFY field of 257 bytes is longer than 256"},
		{in: "IDENTIFY\n\x00\x00\x00\x00", err: "E_BAD_BODY IDENTIFY body of 0 bytes, want 1 to 65536"},
		{in: "IDENTIFY\n\xff\xff\xff\xff", err: "E_BAD_BODY IDENTIFY body of -1 bytes, want 1 to 65536"},
		{in: "IDENTIFY\n\x00\x01\x00\x01", err: "E_BAD_BODY IDENTIFY body of 65537 bytes, want 1 to 65536"},
	} {
		got, n, err := Parse([]byte(c.in))
		switch {
		case c.err != "":
			if err == nil || !strings.HasPrefix(err.Error(), c.err) {
				t.Errorf("%.60q: %v, want %s", c.in, err, c.err)
			}
		case err != nil || n != len(c.in) || got != c.want:
			t.Errorf("%.60q: %+v, %d bytes, %v; want %+v", c.in, got, n, err, c.want)
		}
	}
}

func TestTheMagic(t *testing.T) {
	for in, want := range map[string]int{"": 0, "  V": 0, "  V1": 4, "  V1PING\n": 4} {
		testkit.Result(ParseMagic([]byte(in))).Equal(t, want, "%q", in)
	}
	for _, in := range []string{"x", "  V2", " V1 "} {
		if _, err := ParseMagic([]byte(in)); err == nil || err.Error() != CodeBadProtocol {
			t.Errorf("%q: %v, want %s", in, err, CodeBadProtocol)
		}
	}
}

// For any input in any pieces, the parser returns the same commands up to the same error, nothing with
// an error, and an answer before the bound that the driver keeps.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{"PING\n", "REGISTER t c\nUNREGISTER t\n", identify(hello) + "PING\n", "IDENTIFY\n\xff\xff\xff\xff", "REGISTER\n", "x"} {
		f.Add([]byte(seed))
	}
	parse := func(in []byte, piece int) (all []Command, refusal error) {
		var held []byte
		for {
			c, n, err := Parse(held)
			switch {
			case err != nil:
				if n != 0 || c != (Command{}) {
					f.Fatalf("with an error: %+v, %d bytes", c, n)
				}
				return all, err
			case n > 0:
				all, held = append(all, c), held[n:]
				continue
			}
			if len(held) >= MaxLine+4+MaxBody {
				f.Fatalf("%d bytes and no answer", len(held))
			}
			if len(in) == 0 {
				return all, nil
			}
			take := min(piece, len(in))
			held, in = append(held, in[:take]...), in[take:]
		}
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		whole, err := parse(in, len(in)+1)
		pieces, pieceErr := parse(in, 1)
		if !reflect.DeepEqual(whole, pieces) || !reflect.DeepEqual(err, pieceErr) {
			t.Fatalf("whole: %+v, %v\npieces: %+v, %v", whole, err, pieces, pieceErr)
		}
		var refusal *Error
		if err != nil && (!errors.As(err, &refusal) || !strings.HasPrefix(refusal.Error(), "E_") || len(refusal.Error()) > 200) {
			t.Fatalf("a refusal %q", err)
		}
		for _, c := range whole {
			again := encoded(t, c)
			if back, n, err := Parse(again); err != nil || n != len(again) || back != c {
				t.Fatalf("%+v as %q: %+v, %v", c, again, back, err)
			}
		}
	})
}

// encoded encodes a command, as a node would.
func encoded(t *testing.T, c Command) []byte {
	t.Helper()
	switch c.Verb {
	case Ping:
		return []byte("PING\n")
	case Identify:
		body := testkit.Result(json.Marshal(c.Node)).Must(t)
		return []byte(identify(string(body)))
	}
	verb := map[Verb]string{Register: "REGISTER ", Unregister: "UNREGISTER "}[c.Verb]
	return []byte(strings.TrimSpace(verb+c.Topic+" "+c.Channel) + "\n")
}
