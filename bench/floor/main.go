//go:build linux

// Command floor is a broker that does the least possible work, as a reference for other
// brokers. One thread, blocking in epoll_wait, reads, parses commands, answers each
// command, and writes each message to every subscriber. floor stores nothing, checks
// nothing and limits nothing.
//
//	go run ./bench peer --floor=build/floor
//
// With --mqtt, clients speak MQTT 3.1.1 with quality of service 1.
//
// With --fsync, each turn writes and syncs its messages, with one call each, before the
// answers: a bare group commit.
package main

import (
	"encoding/binary"
	"flag"
	"fmt"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/rawfd"
	"github.com/srtm-io/srtm/mqtt/packet"
	"github.com/srtm-io/srtm/nsq/wire"
)

func main() {
	at := flag.String("tcp-address", "127.0.0.1:4150", "`host:port` for clients that speak NSQ's protocol")
	mqtt := flag.Bool("mqtt", false, "serve clients that speak MQTT 3.1.1 instead")
	file := flag.String("fsync", "", "`file` that messages are in before they are answered (default none)")
	version := flag.Bool("version", false, "say what this is, and exit")
	flag.Parse()
	if *version {
		fmt.Println("bench/floor of this commit,", runtime.Version())
		return
	}
	fmt.Fprintln(os.Stderr, "floor:", serve(*at, *file, *mqtt))
	os.Exit(1)
}

// floor is the event loop.
type floor struct {
	poller   *rawfd.Poller
	listener int
	log      int // file descriptor; -1: none
	conns    []*peer
	subs     []*peer
	dirty    []*peer // peers with unsent bytes
	buf      []byte
	written  []byte // messages of this turn
	mqtt     bool
	lim      wire.Limits
	cmd      wire.Command
	next     uint64
}

// peer is a connection. Its index in floor.conns is its descriptor.
type peer struct {
	fd        int
	rest, out []byte
	listed    bool
	blocked   bool // the socket is full
}

// serve runs the event loop until an error.
func serve(at, file string, mqtt bool) error {
	debug.SetGCPercent(400)
	runtime.LockOSThread()
	ln, err := net.Listen("tcp", at)
	if err != nil {
		return err
	}
	f := &floor{mqtt: mqtt, log: -1, buf: make([]byte, 1<<18), lim: wire.DefaultLimits()}
	own, err := ln.(*net.TCPListener).File()
	if err != nil {
		return err
	}
	f.listener = int(own.Fd())
	if file != "" {
		if f.log, err = unix.Open(file, unix.O_CREAT|unix.O_WRONLY|unix.O_APPEND|unix.O_CLOEXEC, 0o600); err != nil {
			return err
		}
	}
	if f.poller, err = rawfd.NewPoller(); err != nil {
		return err
	}
	if err := unix.SetNonblock(f.listener, true); err != nil {
		return err
	}
	if err := f.poller.Watch(f.listener, int32(f.listener), 0, 0, unix.EPOLLIN); err != nil {
		return err
	}
	for {
		for _, e := range f.poller.Wait(true) {
			switch {
			case int(e.Fd) == f.listener:
				err = f.accept()
			case f.conns[e.Fd] != nil:
				p := f.conns[e.Fd]
				if e.Events&unix.EPOLLOUT != 0 {
					p.blocked = false
					err = f.poller.Watch(p.fd, int32(p.fd), 0, unix.EPOLLIN|unix.EPOLLOUT, unix.EPOLLIN)
					f.touch(p)
				}
				if err == nil && e.Events&^unix.EPOLLOUT != 0 {
					err = f.read(p)
				}
			}
			if err != nil {
				return err
			}
		}
		if err := f.flush(); err != nil {
			return err
		}
	}
}

func (f *floor) accept() error {
	fd, _, err := unix.Accept4(f.listener, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
	if err != nil {
		return nil // the client has gone, or there are too many descriptors
	}
	for len(f.conns) <= fd {
		f.conns = append(f.conns, nil)
	}
	f.conns[fd] = &peer{fd: fd}
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	return f.poller.Watch(fd, int32(fd), 0, 0, unix.EPOLLIN)
}

func (f *floor) touch(p *peer) {
	if !p.listed {
		p.listed = true
		f.dirty = append(f.dirty, p)
	}
}

// read reads once and executes the complete commands.
func (f *floor) read(p *peer) error {
	n := copy(f.buf, p.rest)
	got, err := rawfd.Receive(p.fd, f.buf[n:])
	if err != nil {
		f.conns[p.fd] = nil
		for i, s := range f.subs {
			if s == p {
				f.subs = append(f.subs[:i:i], f.subs[i+1:]...)
			}
		}
		return unix.Close(p.fd)
	}
	rest, err := f.buf[:n+got], error(nil)
	if f.mqtt {
		rest, err = f.packets(p, rest)
	} else {
		rest, err = f.commands(p, rest)
	}
	p.rest = append(p.rest[:0], rest...)
	return err
}

// commands executes the complete commands of NSQ, and returns the rest.
func (f *floor) commands(p *peer, in []byte) (rest []byte, err error) {
	if len(in) >= len(wire.Magic) && string(in[:len(wire.Magic)]) == wire.Magic {
		in = in[len(wire.Magic):]
	}
	for {
		var seen wire.Walk
		n, _, err := f.cmd.Parse(in, &f.lim, &seen)
		if err != nil || n == 0 {
			return in, err
		}
		in = in[n:]
		switch f.cmd.Verb {
		case wire.VerbPub:
			f.message(f.cmd.Body)
		case wire.VerbMpub:
			f.cmd.Batch.Each(f.message)
		case wire.VerbSub:
			f.subs = append(f.subs, p)
		case wire.VerbIdentify:
		default:
			continue // FIN, RDY, NOP
		}
		p.out = wire.AppendResponse(p.out, wire.OK)
		f.touch(p)
	}
}

// packets executes the complete packets of MQTT 3.1.1, and returns the rest. A subscriber gets
// every message.
func (f *floor) packets(p *peer, in []byte) (rest []byte, err error) {
	for {
		kind, body, n, err := packet.Parse(in, len(f.buf))
		if err != nil || n == 0 {
			return in, err
		}
		in = in[n:]
		switch {
		case kind == packet.Connect:
			p.out = packet.Append(p.out, packet.Connack, []byte{0, 0})
		case kind == packet.Subscribe && len(body) > 2:
			f.subs = append(f.subs, p)
			p.out = packet.Append(p.out, packet.Suback, []byte{body[0], body[1], 1})
		case kind&0xF0 == packet.Publish:
			_, payload, id, err := packet.ParseDelivery(packet.V311, body)
			if err != nil {
				return in, err
			}
			p.out = packet.AppendPuback(p.out, id)
			f.next++
			for _, s := range f.subs {
				s.out = packet.Append(s.out, kind, body)
				binary.BigEndian.PutUint16(s.out[len(s.out)-len(payload)-2:], uint16(1+f.next%(1<<16-1)))
				f.touch(s)
			}
		default:
			continue // PUBACK
		}
		f.touch(p)
	}
}

func (f *floor) message(body []byte) {
	var id wire.MessageID
	f.next++
	for i := range id {
		id[i] = 'a' + byte(f.next>>(60-4*i))&15
	}
	now := time.Now().UnixNano()
	if f.log >= 0 {
		f.written = append(f.written, body...)
	}
	for _, s := range f.subs {
		s.out = wire.AppendMessage(s.out, now, 1, id, body)
		f.touch(s)
	}
}

// flush writes the messages and answers of a turn.
func (f *floor) flush() error {
	if len(f.written) > 0 {
		if _, errno := rawfd.Write(f.log, f.written); errno != 0 {
			return errno
		}
		if err := unix.Fdatasync(f.log); err != nil {
			return err
		}
		f.written = f.written[:0]
	}
	for _, p := range f.dirty {
		p.listed = false
		if p.blocked || f.conns[p.fd] != p {
			continue
		}
		n, err := rawfd.Send(p.fd, p.out)
		if err != nil {
			n = len(p.out) // the next read fails, too
		}
		p.out = append(p.out[:0], p.out[n:]...)
		if len(p.out) > 0 {
			p.blocked = true
			if err := f.poller.Watch(p.fd, int32(p.fd), 0, unix.EPOLLIN, unix.EPOLLIN|unix.EPOLLOUT); err != nil {
				return err
			}
		}
	}
	f.dirty = f.dirty[:0]
	return nil
}
