package decide

import (
	"bufio"
	"fmt"
	"net"
	"strings"
)

// gcra is the generic cell rate algorithm (ITU-T I.371) as a Redis script. It is as exact
// as the token bucket, and takes one round trip.
const gcra = `local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local tat = math.max(now, tonumber(redis.call('GET', KEYS[1]) or now))
local new = tat + tonumber(ARGV[1])
if new - now > tonumber(ARGV[2]) then return 0 end
redis.call('SET', KEYS[1], string.format('%.0f', new), 'PX', math.ceil((new - now) / 1000) + 1)
return 1`

func command(words ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "*%d\r\n", len(words))
	for _, w := range words {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(w), w)
	}
	return b.String()
}

// EVALSHA requests decisions from Redis by the script, one command per write.
func EVALSHA(s *Server, l Load) (r Result, err error) {
	conn, err := net.Dial("tcp", s.At)
	if err != nil {
		return r, err
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(command("SCRIPT", "LOAD", gcra))); err != nil {
		return r, err
	}
	in := bufio.NewReader(conn)
	if size, err := in.ReadString('\n'); err != nil || size != "$40\r\n" {
		return r, fmt.Errorf("SCRIPT LOAD: %q, %w", size, err)
	}
	sha, err := in.ReadString('\n')
	if err != nil {
		return r, err
	}
	sha = strings.TrimSpace(sha)
	return Ask(s, l, Stream(func(i int64) string { return command("EVALSHA", sha, "1", key(i), "1", "1000000") }, func(in *bufio.Reader) error {
		line, err := in.ReadString('\n')
		if err == nil && line != ":1\r\n" && line != ":0\r\n" {
			err = fmt.Errorf("EVALSHA: %s", line)
		}
		return err
	}))
}
