package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/socket"
)

// The rules of the proxy belong to a network namespace, whatever directory its
// process keeps its state in and whatever file system it sees. So does the name of
// an abstract socket (unix(7)), which the kernel takes back when the process ends:
// whoever listens on it is the one that may write the rules.
const proxyLockName = "@fairlead/proxy"

// proxyLockWait is how long a proxy waits for another one to end, so that a service
// manager may start the new one while the old one stops.
const proxyLockWait = 10 * time.Second

// errProxyRuns is the error where another process holds the lock.
var errProxyRuns = errors.New("another fairlead proxy runs in this network namespace")

// proxyLock is held by the one process that may write the proxy's rules.
type proxyLock struct{ listener net.Listener }

// Close releases the lock.
func (l proxyLock) Close() {
	if l.listener != nil {
		_ = l.listener.Close()
	}
}

// tryProxyLock takes the lock, or returns errProxyRuns with the process that holds
// it. A process of a user other than root or this one does not hold it, since every
// user can listen on the name and no other user can write the rules: the lock is
// then no lock, which the log says.
func tryProxyLock(log *slog.Logger) (proxyLock, error) {
	l, err := net.Listen("unix", proxyLockName)
	if err == nil {
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_ = c.Close()
			}
		}()
		return proxyLock{l}, nil
	}
	if !errors.Is(err, syscall.EADDRINUSE) {
		return proxyLock{}, fmt.Errorf("lock the proxy's rules: %w", err)
	}
	c, err := net.DialTimeout("unix", proxyLockName, time.Second)
	if err != nil {
		return proxyLock{}, errProxyRuns // or it has just ended
	}
	defer c.Close()
	pid, uid, err := socket.Peer(c.(*net.UnixConn))
	if err != nil {
		return proxyLock{}, errProxyRuns
	}
	if uid != 0 && uid != os.Geteuid() {
		log.Warn("a process of another user holds the name of the proxy's lock; a second proxy would not be noticed",
			"pid", pid, "uid", uid)
		return proxyLock{}, nil
	}
	if pid == 0 {
		return proxyLock{}, fmt.Errorf("%w, in another PID namespace", errProxyRuns)
	}
	return proxyLock{}, fmt.Errorf("%w (process %d)", errProxyRuns, pid)
}

// lockProxy takes the lock for a proxy that is to run until it is closed. It waits
// a while for another one to end.
func lockProxy(ctx context.Context, log *slog.Logger) (proxyLock, error) {
	limit := time.NewTimer(proxyLockWait)
	defer limit.Stop()
	retry := time.NewTicker(100 * time.Millisecond)
	defer retry.Stop()
	for waiting := false; ; waiting = true {
		l, err := tryProxyLock(log)
		if !errors.Is(err, errProxyRuns) {
			return l, err
		}
		if !waiting {
			log.Warn("waiting for another proxy to end", "err", err, "timeout", proxyLockWait)
		}
		select {
		case <-ctx.Done():
			return proxyLock{}, ctx.Err()
		case <-limit.C:
			return proxyLock{}, fmt.Errorf("%w: stop it first; two would undo each other's rules", err)
		case <-retry.C:
		}
	}
}
