package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// The first byte of a connection is its purpose.
const (
	wantStream = 'S' // bytes without end
	wantEcho   = 'E' // every message comes back
	wantOnce   = 'O' // one message comes back, then the end
)

const (
	messageSize = 128
	chunkSize   = 256 << 10
	// loadTimeout bounds one step of a connection under load.
	loadTimeout = 10 * time.Second
)

// serveLoad is the endpoint of the measurements of proxies.
func serveLoad(h *host, port uint16) (io.Closer, error) {
	var l net.Listener
	err := h.on(func() (err error) {
		l, err = net.Listen("tcp4", fmt.Sprintf(":%d", port))
		return err
	})
	if err != nil {
		return nil, err
	}
	go func() { _ = serveEach(l, serveLoadTo) }()
	return l, nil
}

func serveLoadTo(c net.Conn) {
	var kind [1]byte
	if _, err := io.ReadFull(c, kind[:]); err != nil {
		return
	}
	switch kind[0] {
	case wantStream:
		chunk := make([]byte, chunkSize)
		for {
			if _, err := c.Write(chunk); err != nil {
				return
			}
		}
	case wantEcho, wantOnce:
		b := make([]byte, messageSize)
		for once := false; !once; once = kind[0] == wantOnce {
			if _, err := io.ReadFull(c, b); err != nil {
				return
			}
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	}
}

// load makes connections from a host to one address. Each client has a thread
// in the host's namespace and makes blocking system calls: the runtime's poller
// would be measured as well.
type load struct {
	from *host
	to   netip.AddrPort
}

func (l load) dial(kind byte) (fd int, err error) {
	if fd, err = l.connect(); err != nil {
		return -1, err
	}
	if err := writeAll(fd, []byte{kind}); err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("%s: %w", l.to, err)
	}
	return fd, nil
}

func (l load) connect() (fd int, err error) {
	fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	tv := unix.NsecToTimeval(loadTimeout.Nanoseconds())
	err = errors.Join(
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv),
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
		retryEINTR(func() error {
			return unix.Connect(fd, &unix.SockaddrInet4{Port: int(l.to.Port()), Addr: l.to.Addr().As4()})
		}))
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("%s: %w", l.to, err)
	}
	return fd, nil
}

func writeAll(fd int, b []byte) error {
	var n int
	err := retryEINTR(func() (err error) { n, err = unix.Write(fd, b); return err })
	if err == nil && n < len(b) {
		err = io.ErrShortWrite
	}
	return err
}

func readAll(fd int, b []byte) error {
	for len(b) > 0 {
		var n int
		if err := retryEINTR(func() (err error) { n, err = unix.Read(fd, b); return err }); err != nil {
			return err
		}
		if n == 0 {
			return io.ErrUnexpectedEOF
		}
		b = b[n:]
	}
	return nil
}

// clients runs n of them at once, each on a thread on the host.
func (l load) clients(n int, client func(i int) error) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = l.from.on(func() error { return client(i) }) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// stream receives over n connections for d and returns bits a second.
func (l load) stream(ctx context.Context, n int, d time.Duration) (float64, error) {
	return l.streamBy(ctx, n, d, func(fd int, _ []byte) (int, error) { return discard(fd) })
}

// streamBy is stream with the system call that receives, into a buffer of its client.
func (l load) streamBy(ctx context.Context, n int, d time.Duration, receive func(fd int, b []byte) (int, error)) (float64, error) {
	var total atomic.Int64
	start := time.Now()
	err := l.clients(n, func(int) error {
		fd, err := l.dial(wantStream)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		b := make([]byte, chunkSize)
		for time.Since(start) < d && ctx.Err() == nil {
			n, err := receive(fd, b)
			if total.Add(int64(n)); err != nil {
				return err
			}
		}
		return nil
	})
	return 8 * float64(total.Load()) / time.Since(start).Seconds(), errors.Join(err, ctx.Err())
}

// discard receives the pending bytes. MSG_TRUNC on TCP throws the bytes away without a copy, tcp(7): the load costs
// little.
func discard(fd int) (int, error) {
	n, _, e := unix.Syscall6(unix.SYS_RECVFROM, uintptr(fd), 0, chunkSize, unix.MSG_TRUNC, 0, 0)
	switch {
	case e == unix.EINTR:
		return 0, nil
	case e != 0:
		return 0, e
	case n == 0:
		return 0, io.ErrUnexpectedEOF
	}
	return int(n), nil
}

// rate is what a number of clients get, and how long each step takes.
type rate struct {
	perSecond float64
	latency   []float64 // milliseconds
}

// every has n clients repeat a step for d. Each begins with open, which returns
// the step and what ends it.
func (l load) every(ctx context.Context, n int, d time.Duration, open func() (step func() error, done func(), err error)) (rate, error) {
	latency := make([][]float64, n)
	start := time.Now()
	err := l.clients(n, func(i int) error {
		step, done, err := open()
		if err != nil {
			return err
		}
		defer done()
		for before := time.Now(); before.Sub(start) < d && ctx.Err() == nil; {
			if err := step(); err != nil {
				return err
			}
			now := time.Now()
			latency[i] = append(latency[i], milliseconds.in(now.Sub(before)))
			before = now
		}
		return nil
	})
	took := time.Since(start).Seconds()
	all := slices.Concat(latency...)
	return rate{float64(len(all)) / took, all}, errors.Join(err, ctx.Err())
}

// requests has n clients send a message and wait for its echo, each on a
// connection of its own.
func (l load) requests(ctx context.Context, n int, d time.Duration) (rate, error) {
	return l.every(ctx, n, d, func() (func() error, func(), error) {
		fd, err := l.dial(wantEcho)
		if err != nil {
			return nil, nil, err
		}
		b := make([]byte, messageSize)
		return func() error { return echoOn(fd, b) }, func() { _ = unix.Close(fd) }, nil
	})
}

// opens has n clients open connections and reset them: their ports are free
// again at once.
func (l load) opens(ctx context.Context, n int, d time.Duration) (rate, error) {
	return l.every(ctx, n, d, func() (func() error, func(), error) {
		return func() error {
			fd, err := l.connect()
			if err != nil {
				return err
			}
			err = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
			return errors.Join(err, unix.Close(fd))
		}, func() {}, nil
	})
}

// connections has n clients open a connection for each message. The endpoint
// ends it: the port of the proxy's connection to it is free again at once.
func (l load) connections(ctx context.Context, n int, d time.Duration) (rate, error) {
	return l.every(ctx, n, d, func() (func() error, func(), error) {
		b := make([]byte, messageSize)
		return func() error {
			fd, err := l.dial(wantOnce)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			if err := echoOn(fd, b); err != nil {
				return err
			}
			var n int
			if err := retryEINTR(func() (err error) { n, err = unix.Read(fd, b); return err }); err != nil || n != 0 {
				return fmt.Errorf("the endpoint did not end the connection: %d bytes, %w", n, err)
			}
			return nil
		}, func() {}, nil
	})
}

func echoOn(fd int, b []byte) error {
	if err := writeAll(fd, b); err != nil {
		return err
	}
	return readAll(fd, b)
}
