package parts

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

// RuleLock is held by the one process that may write certain rules. Those belong to a
// network namespace, whatever directory the process keeps its state in and whatever
// file system it sees. So does the name of an abstract socket (unix(7)), which the
// kernel takes back when the process ends: whoever listens on it holds the lock.
type RuleLock struct{ socket, holder string }

var (
	// ProxyLock is for the rules of the proxy.
	ProxyLock = RuleLock{"@fairlead/proxy", "proxy"}
	// DNSLock is for the rules and routes of node-local DNS.
	DNSLock = RuleLock{"@fairlead/dns", "node-local DNS server"}
	// TraceLock is for the rules of a trace.
	TraceLock = RuleLock{"@fairlead/trace", "trace"}
)

// lockWait is how long a process waits for another one to end, so that a service
// manager may start the new one while the old one stops.
const lockWait = 10 * time.Second

// errLocked is in the error where another process holds a lock.
var errLocked = errors.New("runs in this network namespace")

// LockHeld is a lock that this process has.
type LockHeld struct{ listener net.Listener }

// Close releases the lock.
func (l LockHeld) Close() {
	if l.listener != nil {
		_ = l.listener.Close()
	}
}

// Try takes the lock, or returns errLocked with the process that holds it. A process
// of a user other than root or this one does not hold it, since every user can listen
// on the name and no other user can write the rules: the lock is then no lock, which
// is logged.
func (r RuleLock) Try(log *slog.Logger) (LockHeld, error) {
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
		return LockHeld{l}, nil
	}
	if !errors.Is(err, syscall.EADDRINUSE) {
		return LockHeld{}, fmt.Errorf("lock the rules of the %s: %w", r.holder, err)
	}
	running := fmt.Errorf("another fairlead %s %w", r.holder, errLocked)
	c, err := net.DialTimeout("unix", r.socket, time.Second)
	if err != nil {
		return LockHeld{}, running // or it has just ended
	}
	defer c.Close()
	pid, uid, err := socket.Peer(c.(*net.UnixConn))
	if err != nil {
		return LockHeld{}, running
	}
	if uid != 0 && uid != os.Geteuid() {
		log.Warn("a process of another user holds the name of the lock; a second "+r.holder+" would not be detected",
			"lock", r.socket, "pid", pid, "uid", uid)
		return LockHeld{}, nil
	}
	if pid == 0 {
		return LockHeld{}, fmt.Errorf("%w, in another PID namespace", running)
	}
	return LockHeld{}, fmt.Errorf("%w (process %d)", running, pid)
}

// Wait takes the lock for a process that runs until it is closed. It waits a while for
// another one to end.
func (r RuleLock) Wait(ctx context.Context, log *slog.Logger) (LockHeld, error) {
	limit := time.NewTimer(lockWait)
	defer limit.Stop()
	retry := time.NewTicker(100 * time.Millisecond)
	defer retry.Stop()
	for waiting := false; ; waiting = true {
		l, err := r.Try(log)
		if !errors.Is(err, errLocked) {
			return l, err
		}
		if !waiting {
			log.Warn("waiting for another "+r.holder+" to end", "err", err, "timeout", lockWait)
		}
		select {
		case <-ctx.Done():
			return LockHeld{}, ctx.Err()
		case <-limit.C:
			return LockHeld{}, fmt.Errorf("%w: stop it first; two would undo each other's rules", err)
		case <-retry.C:
		}
	}
}
