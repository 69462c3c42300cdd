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

// ruleLock is held by the one process that may write certain rules. Those belong to a
// network namespace, whatever directory the process keeps its state in and whatever
// file system it sees. So does the name of an abstract socket (unix(7)), which the
// kernel takes back when the process ends: whoever listens on it holds the lock.
type ruleLock struct{ socket, holder string }

var (
	// proxyLock is for the rules of the proxy.
	proxyLock = ruleLock{"@fairlead/proxy", "proxy"}
	// dnsLock is for the rules and routes of node-local DNS.
	dnsLock = ruleLock{"@fairlead/dns", "node-local DNS server"}
)

// lockWait is how long a process waits for another one to end, so that a service
// manager may start the new one while the old one stops.
const lockWait = 10 * time.Second

// errLocked is in the error where another process holds a lock.
var errLocked = errors.New("runs in this network namespace")

// lockHeld is a lock that this process has.
type lockHeld struct{ listener net.Listener }

// Close releases the lock.
func (l lockHeld) Close() {
	if l.listener != nil {
		_ = l.listener.Close()
	}
}

// try takes the lock, or returns errLocked with the process that holds it. A process
// of a user other than root or this one does not hold it, since every user can listen
// on the name and no other user can write the rules: the lock is then no lock, which
// is logged.
func (r ruleLock) try(log *slog.Logger) (lockHeld, error) {
	l, err := net.Listen("unix", r.socket)
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
		return lockHeld{l}, nil
	}
	if !errors.Is(err, syscall.EADDRINUSE) {
		return lockHeld{}, fmt.Errorf("lock the rules of the %s: %w", r.holder, err)
	}
	running := fmt.Errorf("another fairlead %s %w", r.holder, errLocked)
	c, err := net.DialTimeout("unix", r.socket, time.Second)
	if err != nil {
		return lockHeld{}, running // or it has just ended
	}
	defer c.Close()
	pid, uid, err := socket.Peer(c.(*net.UnixConn))
	if err != nil {
		return lockHeld{}, running
	}
	if uid != 0 && uid != os.Geteuid() {
		log.Warn("a process of another user holds the name of the lock; a second "+r.holder+" would not be noticed",
			"lock", r.socket, "pid", pid, "uid", uid)
		return lockHeld{}, nil
	}
	if pid == 0 {
		return lockHeld{}, fmt.Errorf("%w, in another PID namespace", running)
	}
	return lockHeld{}, fmt.Errorf("%w (process %d)", running, pid)
}

// wait takes the lock for a process that runs until it is closed. It waits a while for
// another one to end.
func (r ruleLock) wait(ctx context.Context, log *slog.Logger) (lockHeld, error) {
	limit := time.NewTimer(lockWait)
	defer limit.Stop()
	retry := time.NewTicker(100 * time.Millisecond)
	defer retry.Stop()
	for waiting := false; ; waiting = true {
		l, err := r.try(log)
		if !errors.Is(err, errLocked) {
			return l, err
		}
		if !waiting {
			log.Warn("waiting for another "+r.holder+" to end", "err", err, "timeout", lockWait)
		}
		select {
		case <-ctx.Done():
			return lockHeld{}, ctx.Err()
		case <-limit.C:
			return lockHeld{}, fmt.Errorf("%w: stop it first; two would undo each other's rules", err)
		case <-retry.C:
		}
	}
}
