package local

import (
	"io"
	"net"
	"sync"
)

// Proxy forwards TCP to one address. While cut, it swallows all data and accepts
// connections that lead nowhere. Neither end can distinguish this from a slow network.
type Proxy struct {
	ln    net.Listener
	greet Greeting // nil: none
	all   sync.WaitGroup

	mu struct {
		sync.Mutex
		target string
		cut    bool
		conns  map[net.Conn]struct{}
		ended  bool
	}
}

// Greeting talks on a new pair of connections before the proxy forwards bytes. It returns
// the connections to forward between; closing them closes the given connections.
type Greeting func(near, far net.Conn) (net.Conn, net.Conn, error)

// NewProxy starts a proxy on its own port.
func NewProxy(target string) (*Proxy, error) { return NewGreetingProxy(target, nil) }

// NewGreetingProxy is NewProxy with a greeting on each connection.
func NewGreetingProxy(target string, greet Greeting) (*Proxy, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &Proxy{ln: ln, greet: greet}
	p.mu.target = target
	p.mu.conns = map[net.Conn]struct{}{}
	p.all.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			if p.register(c) {
				p.all.Go(func() { p.serve(c) })
			}
		}
	})
	return p, nil
}

// Address returns the listen address.
func (p *Proxy) Address() string { return p.ln.Addr().String() }

func (p *Proxy) register(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.ended {
		c.Close()
		return false
	}
	p.mu.conns[c] = struct{}{}
	return true
}

func (p *Proxy) drop(c net.Conn) {
	p.mu.Lock()
	delete(p.mu.conns, c)
	p.mu.Unlock()
	c.Close()
}

func (p *Proxy) isCut() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.cut
}

func (p *Proxy) serve(near net.Conn) {
	defer p.drop(near)
	if p.isCut() {
		_, _ = io.Copy(io.Discard, near) // until the proxy is mended
		return
	}
	p.mu.Lock()
	target := p.mu.target
	p.mu.Unlock()
	far, err := net.DialTimeout("tcp", target, Patience)
	if err != nil || !p.register(far) {
		return
	}
	defer p.drop(far)
	if p.greet != nil {
		if near, far, err = p.greet(near, far); err != nil {
			return
		}
	}
	var back sync.WaitGroup
	back.Go(func() { p.copy(near, far) })
	p.copy(far, near)
	back.Wait()
}

func (p *Proxy) copy(dst, src net.Conn) {
	defer dst.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := src.Read(buf)
		if err != nil {
			return
		}
		if p.isCut() {
			continue
		}
		if _, err := dst.Write(buf[:n]); err != nil {
			return
		}
	}
}

// Cut cuts or mends the proxy. Swallowed data is lost, so mending ends the earlier
// connections.
func (p *Proxy) Cut(cut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.cut = cut
	if !cut {
		for c := range p.mu.conns {
			c.Close()
		}
	}
}

// Retarget changes the target of new connections. Existing connections stay.
func (p *Proxy) Retarget(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.target = target
}

// Drop ends connections selected by their source ports.
func (p *Proxy) Drop(selects func(port int) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.mu.conns {
		if accepted := c.LocalAddr().String() == p.ln.Addr().String(); accepted && selects(c.RemoteAddr().(*net.TCPAddr).Port) {
			c.Close()
		}
	}
}

// Close closes the proxy and its connections.
func (p *Proxy) Close() {
	p.ln.Close()
	p.mu.Lock()
	p.mu.ended = true
	for c := range p.mu.conns {
		c.Close()
	}
	p.mu.Unlock()
	p.all.Wait()
}
