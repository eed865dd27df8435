package wire_test

import (
	"fmt"
	"time"

	"github.com/srtm-io/srtm/nsq/wire"
)

// A client publishes a message: first the protocol's magic, then the command.
func ExampleAppendPub() {
	out := wire.AppendMagic(nil)
	out = wire.AppendPub(out, "greetings", []byte("hello"))
	fmt.Printf("%q\n", out)
	// Output: "  V2PUB greetings\n\x00\x00\x00\x05hello"
}

// A server reads two commands from a buffer. The second command has not arrived completely, so Parse
// says how many bytes the buffer needs.
func ExampleCommand_Parse() {
	buffer := wire.AppendSub(nil, "greetings", "archive")
	buffer = wire.AppendPub(buffer, "greetings", []byte("hello"))
	buffer = buffer[:len(buffer)-2]

	limits := wire.DefaultLimits()
	var command wire.Command
	var walk wire.Walk
	for {
		n, need, err := command.Parse(buffer, &limits, &walk)
		if err != nil || n == 0 {
			fmt.Println("have", len(buffer), "need", need, "error", err)
			return
		}
		fmt.Printf("%v %s %s\n", command.Verb, command.Topic, command.Channel)
		buffer = buffer[n:]
	}
	// Output:
	// SUB greetings archive
	// have 21 need 23 error <nil>
}

// A consumer reads a frame with a message.
func ExampleParseFrame() {
	in := wire.AppendMessage(nil, 1_700_000_000_000_000_000, 1, wire.MessageID([]byte("0123456789abcdef")), []byte("hello"))

	kind, data, n, err := wire.ParseFrame(in, 1<<20)
	if err != nil || n == 0 {
		fmt.Println("incomplete or malformed:", err)
		return
	}
	m, err := wire.ParseMessage(data)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%v %v attempt %d: %s\n", kind, m.ID, m.Attempts, m.Body)
	fmt.Printf("%q\n", wire.AppendFin(nil, m.ID))
	// Output:
	// message 0123456789abcdef attempt 1: hello
	// "FIN 0123456789abcdef\n"
}

// A broker refuses a publish that exceeds the contract of its topic. The connection stays usable, and
// the client learns when to try again.
func ExampleError_RetryAfter() {
	refusal := wire.ParseError([]byte(wire.RateLimited(250 * time.Millisecond).Error()))
	after, known := refusal.RetryAfter()
	fmt.Println(refusal.Code, refusal.Fatal, after, known)
	// Output: E_RATE_LIMITED false 250ms true
}
