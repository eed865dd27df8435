package conformance

import (
	"strings"
	"testing"
)

func TestConnection(t *testing.T) {
	group(t)
	check(t, "magic, then a command", func(t *testing.T) {
		n := common(t)
		n.open(t).alive(n)
	})
	check(t, "magic byte by byte", func(t *testing.T) {
		n := common(t)
		p := n.dial(t)
		for _, b := range []byte("  V2") {
			p.raw([]byte{b})
		}
		p.alive(n)
	})
	check(t, "nothing is sent before a command", func(t *testing.T) {
		common(t).open(t).quiet()
	})
	for _, magic := range []string{"  V1", "  V3", "V2  ", "PUB ", "GET / HTTP/1.1\r\n\r\n", "\x00\x00\x00\x00"} {
		check(t, "magic "+strings.TrimSpace(strings.ToValidUTF8(magic[:4], "?"))+" is refused", func(t *testing.T) {
			p := common(t).dial(t)
			p.send("%s", magic)
			p.fatal("E_BAD_PROTOCOL")
		})
	}
	check(t, "others live on when one leaves inside the magic", func(t *testing.T) {
		n := common(t)
		other := n.open(t)
		p := n.dial(t)
		p.send("  ")
		p.nc.Close()
		other.alive(n)
	})
	check(t, "others live on when one leaves inside a body", func(t *testing.T) {
		n := common(t)
		other := n.open(t)
		topic := n.topic()
		p := n.open(t)
		p.raw(claimed("PUB "+topic, 100, "half"))
		p.nc.Close()
		other.alive(n)
		if s, exists := n.lookup(t, topic); exists && s.MessageCount != 0 {
			t.Fatalf("half a message was accepted: %+v", s)
		}
	})
}

func TestCommandLine(t *testing.T) {
	group(t)
	for _, line := range []string{"PUBLISH t", "pub t", "FOO", " NOP", "", "\x00"} {
		check(t, "not a command "+strings.Trim(line, " \x00"), func(t *testing.T) {
			p := common(t).open(t)
			p.send("%s\n", line)
			p.fatal("E_INVALID")
		})
	}
	check(t, "ends in LF or CRLF", func(t *testing.T) {
		n := common(t)
		p := n.open(t)
		p.send("NOP\r\n")
		p.send("SUB %s ch\r\n", n.topic())
		p.ok()
	})
	check(t, "byte by byte", func(t *testing.T) {
		n := common(t)
		p := n.open(t)
		for _, b := range sized("PUB "+n.topic(), "body") {
			p.raw([]byte{b})
		}
		p.ok()
	})
	check(t, "NOP has no reply", func(t *testing.T) {
		p := common(t).open(t)
		p.send("NOP\nNOP\nNOP\n")
		p.quiet()
	})
	check(t, "replies come in the order of commands", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		p := n.open(t)
		var all []byte
		all = append(all, sized("PUB "+topic, "1")...)
		all = append(all, "NOP\n"...)
		all = append(all, sized("MPUB "+topic, batch("2", "3"))...)
		all = append(all, sized("DPUB "+topic+" 0", "4")...)
		all = append(all, "SUB "+topic+" ch\nFIN "+noID+"\nREQ "+noID+" 0\nTOUCH "+noID+"\n"...)
		all = append(all, sized("PUB "+topic, "5")...)
		all = append(all, "CLS\n"...)
		p.raw(all)
		p.oks(4)
		p.fault("E_FIN_FAILED")
		p.fault("E_REQ_FAILED")
		p.fault("E_TOUCH_FAILED")
		p.ok()
		p.response("CLOSE_WAIT")
	})
	check(t, "nothing after a fatal error is carried out", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		p := n.open(t)
		p.raw(append([]byte("BAD\n"), sized("PUB "+topic, "late")...))
		p.fatal("E_INVALID")
		if s, exists := n.lookup(t, topic); exists {
			t.Fatalf("the command after the fatal one had an effect: %+v", s)
		}
	})
	check(t, "a line that does not end is refused", func(t *testing.T) {
		p := common(t).open(t)
		p.raw([]byte(strings.Repeat("x", 64<<10)))
		p.hungUp()
	})
}

// Parameters beyond those of a command are ignored.
func TestTrailingParameters(t *testing.T) {
	group(t)
	for verb, command := range map[string]struct{ line, body, reply string }{
		"IDENTIFY": {"IDENTIFY more", "{}", "OK"},
		"PUB":      {"PUB trailing more", "x", "OK"},
		"MPUB":     {"MPUB trailing more", batch("x"), "OK"},
		"DPUB":     {"DPUB trailing 0 more", "x", "OK"},
		"SUB":      {"SUB trailing ch more", "", "OK"},
		"NOP":      {"NOP more", "", ""},
		"RDY":      {"RDY 1 more", "", ""},
		"FIN":      {"FIN " + noID + " more", "", "E_FIN_FAILED"},
		"REQ":      {"REQ " + noID + " 0 more", "", "E_REQ_FAILED"},
		"TOUCH":    {"TOUCH " + noID + " more", "", "E_TOUCH_FAILED"},
		"CLS":      {"CLS more", "", "CLOSE_WAIT"},
	} {
		check(t, verb, func(t *testing.T) {
			n := common(t)
			p := n.open(t)
			switch verb {
			case "RDY", "FIN", "REQ", "TOUCH", "CLS":
				p.sub(n.topic(), "ch")
			}
			if command.body == "" {
				p.send("%s\n", command.line)
			} else {
				p.raw(sized(command.line, command.body))
			}
			switch {
			case strings.HasPrefix(command.reply, "E_"):
				p.fault(command.reply)
			case command.reply != "":
				p.response(command.reply)
			}
			p.alive(n)
		})
	}
}

// A peer that sends on while nsqd hangs up must still be able to read why:
// client libraries report it.
func TestErrorIsReadable(t *testing.T) {
	group(t)
	check(t, "after much more input", func(t *testing.T) {
		n := common(t)
		p := n.open(t)
		p.raw(append([]byte("BAD\n"), sized("PUB "+n.topic(), strings.Repeat("x", 4<<10))...))
		p.fault("E_INVALID")
	})
	check(t, "frame type 1, code, text", func(t *testing.T) {
		p := common(t).open(t)
		p.send("BAD\n")
		if text := p.fault("E_INVALID"); !strings.Contains(text, "BAD") {
			t.Errorf("text %q does not say what was invalid", text)
		}
	})
}
