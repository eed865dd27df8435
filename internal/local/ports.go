package local

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
)

// ports hands out each port once, because a port belongs to no process between its choice
// and its use, nor while a test restarts the program that uses it. It stays below the system's
// ports for outgoing connections.
type ports struct {
	mu struct {
		sync.Mutex
		last int
	}
}

// free is shared by the process, because two ports would hand out the same numbers.
var free ports

// Ports returns count free loopback addresses.
func Ports(count int) ([]string, error) { return free.take(count) }

func (p *ports) take(count int) ([]string, error) {
	const first, last = 10_000, 30_000
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.last == 0 {
		p.mu.last = first + os.Getpid()*101%(last-first)
	}
	var addresses []string
	var errs []error
	for len(addresses) < count {
		if p.mu.last++; p.mu.last >= last {
			p.mu.last = first
		}
		if taken, err := reserve(p.mu.last); err != nil {
			return nil, err
		} else if !taken {
			continue
		}
		address := fmt.Sprintf("127.0.0.1:%d", p.mu.last)
		ln, err := net.Listen("tcp", address)
		if err != nil {
			if errs = append(errs, err); len(errs) > 100 {
				return nil, errors.Join(errs...)
			}
			continue
		}
		if err := ln.Close(); err != nil {
			return nil, err
		}
		addresses = append(addresses, address)
	}
	return addresses, nil
}
