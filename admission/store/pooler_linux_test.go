package store_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"sync"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// The store works behind a connection pooler that gives each transaction another connection to the
// database, as PgBouncer does with pool_mode=transaction.
func TestPostgreSQLBehindAPooler(t *testing.T) {
	database, _, _ := testkit.PostgreSQL(t, "")
	pooled := pooler(t, database)
	t.Run("owners", func(t *testing.T) { owners(t, pooled) })
	suite(t, pooled)
}

// pooler returns the URL of a pooler in front of the database. The pooler has three connections. Each
// transaction takes the connection that has been idle for longest.
func pooler(t *testing.T, database string) string {
	t.Helper()
	u := testkit.Result(url.Parse(database)).Must(t)
	socket := fmt.Sprintf("%s/.s.PGSQL.5432", u.Query().Get("host"))
	const connections = 3
	idle := make(chan *backend, connections)
	var running sync.WaitGroup
	for range connections {
		b := &backend{Conn: testkit.Result(net.Dial("unix", socket)).Must(t)}
		t.Cleanup(func() { b.Close() })
		b.startup = testkit.Result(b.start("user", u.Query().Get("user"), "database", u.Path[1:])).Must(t)
		idle <- b
	}
	front := testkit.Result(net.Listen("tcp", "127.0.0.1:0")).Must(t)
	var mu sync.Mutex
	clients := map[net.Conn]bool{}
	t.Cleanup(func() {
		front.Close()
		mu.Lock()
		for c := range clients {
			c.Close()
		}
		mu.Unlock()
		running.Wait()
	})
	running.Go(func() {
		for {
			c, err := front.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			clients[c] = true
			mu.Unlock()
			running.Go(func() {
				defer c.Close()
				if err := serveClient(c, idle); err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
					t.Logf("a client of the pooler: %v", err)
				}
			})
		}
	})
	return fmt.Sprintf("postgres://%s@%s%s?sslmode=disable", u.Query().Get("user"), front.Addr(), u.Path)
}

// backend is a connection to the database.
type backend struct {
	net.Conn
	startup []byte // the database's messages at startup
}

// start begins a connection with these parameters.
func (b *backend) start(parameters ...string) (said []byte, err error) {
	body := binary.BigEndian.AppendUint32(nil, 3<<16)
	for _, p := range parameters {
		body = append(append(body, p...), 0)
	}
	body = append(body, 0)
	if _, err := b.Write(append(binary.BigEndian.AppendUint32(nil, uint32(4+len(body))), body...)); err != nil {
		return nil, err
	}
	for {
		m, err := message(b)
		if err != nil {
			return nil, err
		}
		said = append(said, m...)
		if m[0] == 'Z' {
			return said, nil
		}
	}
}

// message reads a message: its type, its length, its body.
func message(from io.Reader) ([]byte, error) {
	head := make([]byte, 5)
	if _, err := io.ReadFull(from, head); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[1:])
	if n < 4 || n > 1<<24 {
		return nil, fmt.Errorf("a message of %d bytes", n)
	}
	m := append(head, make([]byte, n-4)...)
	_, err := io.ReadFull(from, m[5:])
	return m, err
}

// serveClient passes on the exchanges of a client. Each transaction goes to one of the idle
// connections.
func serveClient(c net.Conn, idle chan *backend) error {
	head := make([]byte, 8)
	if _, err := io.ReadFull(c, head); err != nil {
		return err
	}
	if binary.BigEndian.Uint32(head[4:]) != 3<<16 { // a cancel request; a pooler may lose it
		return nil
	}
	if _, err := io.CopyN(io.Discard, c, int64(binary.BigEndian.Uint32(head))-8); err != nil {
		return err
	}
	b := <-idle
	startup := b.startup
	idle <- b
	if _, err := c.Write(startup); err != nil {
		return err
	}
	for {
		exchange, err := exchange(c)
		if err != nil {
			return err
		}
		b := <-idle
		gone, err := transaction(c, b, exchange)
		if err != nil {
			return fmt.Errorf("the database: %w", err)
		}
		idle <- b
		if gone != nil {
			return gone
		}
	}
}

// exchange reads a client's messages until the client waits for the answer.
func exchange(c io.Reader) (all []byte, err error) {
	for {
		m, err := message(c)
		if err != nil {
			return nil, err
		}
		if m[0] == 'X' {
			return nil, io.EOF
		}
		if all = append(all, m...); m[0] == 'S' || m[0] == 'Q' {
			return all, nil
		}
	}
}

// transaction passes on exchanges until the connection is in no transaction. If the client disconnects
// earlier, transaction rolls back.
func transaction(c io.ReadWriter, b *backend, next []byte) (gone, err error) {
	for {
		if _, err := b.Write(next); err != nil {
			return gone, err
		}
		status := byte(0)
		for status == 0 {
			m, err := message(b)
			if err != nil {
				return gone, err
			}
			if gone == nil {
				_, gone = c.Write(m)
			}
			if m[0] == 'Z' {
				status = m[5]
			}
		}
		if status == 'I' {
			return gone, nil
		}
		if gone == nil {
			next, gone = exchange(c)
		}
		if gone != nil {
			next = append([]byte{'Q', 0, 0, 0, 4 + 9}, "ROLLBACK\x00"...)
		}
	}
}
