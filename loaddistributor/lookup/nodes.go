package lookup

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/registry"
)

// Timeouts of a node's connection. A node pings every 15 s.
const (
	// greetTimeout bounds the time to the end of the magic.
	greetTimeout = 10 * time.Second
	// silence is the multiple of Config.InactiveAfter after which a silent node is
	// disconnected. A node is hidden after InactiveAfter and returns if it speaks before
	// the disconnection.
	silence = 2
	// writeTimeout bounds an answer to a node that does not read.
	writeTimeout = 5 * time.Second
)

// Nodes serves the TCP protocol of registering nodes. Make it with NewNodes, then Run it.
type Nodes struct {
	// Set by NewNodes.
	dir      *Directory
	log      *slog.Logger // of the nodes' actions
	closeLog func()       // closes log
	idle     time.Duration

	// Written by connections, read for metrics.
	refused, faulted atomic.Uint64
}

// NewNodes returns a server for a directory. cfg is the directory's configuration. If
// metrics is nil, NewNodes registers no metrics.
func NewNodes(dir *Directory, cfg registry.Config, log *slog.Logger, metrics prometheus.Registerer) *Nodes {
	inactive := cfg.InactiveAfter
	if inactive == 0 {
		inactive = registry.DefaultInactiveAfter
	}
	n := &Nodes{dir: dir, idle: silence * inactive}
	n.log, n.closeLog = obs.Sparse(log)
	if metrics != nil {
		n.register(metrics)
	}
	return n
}

// Run serves ln until ctx ends, then closes ln and waits for all connections to end.
func (n *Nodes) Run(ctx context.Context, ln net.Listener) error {
	defer n.closeLog()
	return lifecycle.ServeConns(ctx, "nodes", ln, func(err error) {
		n.log.Warn("a node's connection is not accepted", obs.KeyError, err)
	}, n.serve)
}

// serve handles one node's connection.
func (n *Nodes) serve(ctx context.Context, conn net.Conn) {
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })() // the connection ends in any case
	log := n.log.With(obs.KeyRemote, conn.RemoteAddr().String())
	var id registry.ID
	err := n.dir.change(func(r *registry.Registry) (err error) {
		id, err = r.Join(clock.Mono(), conn.RemoteAddr().String())
		return err
	})
	if err != nil {
		n.refused.Add(1)
		log.Warn("node refused", obs.KeyError, err)
		return
	}
	defer func() {
		// Leave returns no error.
		_ = n.dir.change(func(r *registry.Registry) error { r.Leave(id); return nil })
	}()
	err = n.converse(conn, id, log)
	var refusal *registry.Error
	switch {
	case errors.As(err, &refusal):
		n.faulted.Add(1)
		log.Warn("node refused", obs.KeyError, err)
		_ = answer(conn, []byte(refusal.Error())) // the connection ends in any case
	case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed):
		log.Info("node gone")
	default:
		n.faulted.Add(1)
		log.Info("node lost", obs.KeyError, err)
	}
}

// buffer is the maximum length of one command in bytes.
const buffer = registry.MaxLine + 4 + registry.MaxBody

// converse answers commands until the connection ends.
func (n *Nodes) converse(conn net.Conn, id registry.ID, log *slog.Logger) error {
	var input []byte
	chunk := make([]byte, 4096)
	// readMore reads more bytes.
	readMore := func(timeout time.Duration) error {
		if len(input) >= buffer {
			panic(fmt.Sprintf("lookup: %d bytes and no command", len(input)))
		}
		if err := conn.SetReadDeadline(time.Now().Add(timeout)); err != nil {
			return err
		}
		n, err := conn.Read(chunk[:min(len(chunk), buffer-len(input))])
		input = append(input, chunk[:n]...)
		if n > 0 {
			return nil // the next Read returns the error again
		}
		return err
	}
	for {
		n, err := registry.ParseMagic(input)
		if err != nil {
			return err
		}
		if input = input[n:]; n > 0 {
			break
		}
		if err := readMore(greetTimeout); err != nil {
			return err
		}
	}
	for {
		command, size, err := registry.Parse(input)
		if err != nil {
			return err
		}
		if size == 0 {
			if err := readMore(n.idle); err != nil {
				return err
			}
			continue
		}
		input = append(input[:0], input[size:]...)
		var text []byte
		err = n.dir.change(func(r *registry.Registry) (err error) {
			text, err = r.Handle(clock.Mono(), id, command)
			return err
		})
		if err != nil {
			return err
		}
		if command.Verb == registry.Identify {
			log.Info("node registered", obs.KeyAddress, command.Node.BroadcastAddress, "tcp_port", command.Node.TCPPort, obs.KeyVersion, command.Node.Version)
		}
		if err := answer(conn, text); err != nil {
			return err
		}
	}
}

// answer writes one answer.
func answer(conn net.Conn, text []byte) error {
	if err := conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	_, err := conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(text))), text...))
	return err
}

// register exports the server's metrics.
func (n *Nodes) register(reg prometheus.Registerer) {
	stats := func(count func(registry.Stats) int) func() float64 {
		return func() (value float64) {
			_ = n.dir.change(func(r *registry.Registry) error { value = float64(count(r.Stats())); return nil }) // change returns no error here
			return value
		}
	}
	gauge := func(name, help string, value func(registry.Stats) int) {
		reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "srtm_lookup_" + name, Help: help}, stats(value)))
	}
	counter := func(name, help string, value *atomic.Uint64) {
		reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "srtm_lookup_" + name, Help: help}, func() float64 { return float64(value.Load()) }))
	}
	gauge("nodes_connected", "Nodes connected to the registration port, identified or not.", func(f registry.Stats) int { return f.Connections })
	gauge("names", "Topics and channels registered or created.", func(f registry.Stats) int { return f.Names })
	counter("nodes_refused_total", "Connections of nodes refused since there were too many.", &n.refused)
	counter("nodes_faulted_total", "Connections of nodes that ended with an error.", &n.faulted)
}
