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
		input string
		want  Command
		err   string
	}{
		{input: "PING\n", want: Command{Verb: Ping}},
		{input: "PING\r\n", want: Command{Verb: Ping}},
		{input: "PING a b\n", want: Command{Verb: Ping}},
		{input: " PING \n", want: Command{Verb: Ping}},
		{input: "REGISTER t\n", want: Command{Verb: Register, Topic: "t"}},
		{input: "REGISTER t \n", want: Command{Verb: Register, Topic: "t"}},
		{input: "REGISTER t c\n", want: Command{Verb: Register, Topic: "t", Channel: "c"}},
		{input: "REGISTER t c extra\n", want: Command{Verb: Register, Topic: "t", Channel: "c"}},
		{input: "REGISTER t  c\n", want: Command{Verb: Register, Topic: "t"}},
		{input: "UNREGISTER t#ephemeral c#ephemeral\n", want: Command{Verb: Unregister, Topic: "t#ephemeral", Channel: "c#ephemeral"}},
		{input: identify(hello), want: Command{Verb: Identify, Node: node}},
		{input: strings.Replace(identify(hello), "IDENTIFY", "IDENTIFY foo", 1), want: Command{Verb: Identify, Node: node}},
		{input: identify(without("hostname")), want: Command{Verb: Identify, Node: Node{BroadcastAddress: "10.1.1.1", HTTPPort: 4151, TCPPort: 4150, Version: "1.3.0"}}},
		{input: identify(strings.Replace(hello, "4151", "-1", 1)), want: Command{Verb: Identify, Node: Node{BroadcastAddress: "10.1.1.1", Hostname: "h", HTTPPort: -1, TCPPort: 4150, Version: "1.3.0"}}},

		{input: "\n", err: "E_INVALID invalid command "},
		{input: "ping\n", err: "E_INVALID invalid command ping"},
		{input: "FOO\xff\n", err: "E_INVALID invalid command FOO?"},
		{input: "REGISTER\n", err: "E_INVALID REGISTER insufficient number of params"},
		{input: "UNREGISTER\n", err: "E_INVALID UNREGISTER insufficient number of params"},
		{input: "REGISTER bad!topic\n", err: "E_BAD_TOPIC REGISTER topic name 'bad!topic' is not valid"},
		{input: "REGISTER  t\n", err: "E_BAD_TOPIC REGISTER topic name '' is not valid"},
		{input: "REGISTER #ephemeral\n", err: "E_BAD_TOPIC REGISTER topic name '#ephemeral' is not valid"},
		{input: "REGISTER t\tc\n", err: "E_BAD_TOPIC REGISTER topic name 't\tc' is not valid"},
		{input: "REGISTER " + strings.Repeat("x", 65) + "\n", err: "E_BAD_TOPIC"},
		{input: "UNREGISTER t bad!ch\n", err: "E_BAD_CHANNEL UNREGISTER channel name 'bad!ch' is not valid"},
		{input: strings.Repeat("x", MaxLine), err: "E_INVALID command is longer than 1024 bytes"},
		{input: identify("x{"), err: "E_BAD_BODY IDENTIFY failed to decode JSON body"},
		{input: identify("[]"), err: "E_BAD_BODY IDENTIFY failed to decode JSON body"},
		{input: identify(strings.Replace(hello, "4150", `"4150"`, 1)), err: "E_BAD_BODY IDENTIFY failed to decode JSON body"},
		{input: identify(without("broadcast_address")), err: "E_BAD_BODY IDENTIFY missing fields"},
		{input: identify(without("tcp_port")), err: "E_BAD_BODY IDENTIFY missing fields"},
		{input: identify(without("http_port")), err: "E_BAD_BODY IDENTIFY missing fields"},
		{input: identify(without("version")), err: "E_BAD_BODY IDENTIFY missing fields"},
		{input: identify(strings.Replace(hello, "4150", "70000", 1)), err: "E_BAD_BODY IDENTIFY port 70000 is outside -1 to 65535"},
		{input: identify(strings.Replace(hello, "1.3.0", strings.Repeat("x", MaxField+1), 1)), err: "E_BAD_BODY IDENTIFY field of 257 bytes is longer than 256"},
		{input: "IDENTIFY\n\x00\x00\x00\x00", err: "E_BAD_BODY IDENTIFY body of 0 bytes, want 1 to 65536"},
		{input: "IDENTIFY\n\xff\xff\xff\xff", err: "E_BAD_BODY IDENTIFY body of -1 bytes, want 1 to 65536"},
		{input: "IDENTIFY\n\x00\x01\x00\x01", err: "E_BAD_BODY IDENTIFY body of 65537 bytes, want 1 to 65536"},
	} {
		got, n, err := Parse([]byte(c.input))
		switch {
		case c.err != "":
			if err == nil || !strings.HasPrefix(err.Error(), c.err) {
				t.Errorf("%.60q: %v, want %s", c.input, err, c.err)
			}
		case err != nil || n != len(c.input) || got != c.want:
			t.Errorf("%.60q: %+v, %d bytes, %v; want %+v", c.input, got, n, err, c.want)
		}
	}
}

func TestTheMagic(t *testing.T) {
	for input, want := range map[string]int{"": 0, "  V": 0, "  V1": 4, "  V1PING\n": 4} {
		testkit.Result(ParseMagic([]byte(input))).Equal(t, want, "%q", input)
	}
	for _, input := range []string{"x", "  V2", " V1 "} {
		if _, err := ParseMagic([]byte(input)); err == nil || err.Error() != CodeBadProtocol {
			t.Errorf("%q: %v, want %s", input, err, CodeBadProtocol)
		}
	}
}

// For any input in any pieces, the parser returns the same commands up to the same error, nothing with
// an error, and an answer before the bound that the driver keeps.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{"PING\n", "REGISTER t c\nUNREGISTER t\n", identify(hello) + "PING\n", "IDENTIFY\n\xff\xff\xff\xff", "REGISTER\n", "x"} {
		f.Add([]byte(seed))
	}
	parse := func(input []byte, piece int) (all []Command, refusal error) {
		var buffered []byte
		for {
			c, n, err := Parse(buffered)
			switch {
			case err != nil:
				if n != 0 || c != (Command{}) {
					f.Fatalf("with an error: %+v, %d bytes", c, n)
				}
				return all, err
			case n > 0:
				all, buffered = append(all, c), buffered[n:]
				continue
			}
			if len(buffered) >= MaxLine+4+MaxBody {
				f.Fatalf("%d bytes and no answer", len(buffered))
			}
			if len(input) == 0 {
				return all, nil
			}
			size := min(piece, len(input))
			buffered, input = append(buffered, input[:size]...), input[size:]
		}
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		whole, err := parse(input, len(input)+1)
		pieces, pieceErr := parse(input, 1)
		if !reflect.DeepEqual(whole, pieces) || !reflect.DeepEqual(err, pieceErr) {
			t.Fatalf("whole: %+v, %v\npieces: %+v, %v", whole, err, pieces, pieceErr)
		}
		var refusal *Error
		if err != nil && (!errors.As(err, &refusal) || !strings.HasPrefix(refusal.Error(), "E_") || len(refusal.Error()) > 200) {
			t.Fatalf("a refusal %q", err)
		}
		for _, c := range whole {
			again := encoded(t, c)
			if parsed, n, err := Parse(again); err != nil || n != len(again) || parsed != c {
				t.Fatalf("%+v as %q: %+v, %v", c, again, parsed, err)
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
