package systemd

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"time"
)

// States of the unit for Notify (sd_notify(3)).
const (
	Ready    = "READY=1"
	Stopping = "STOPPING=1"
	Alive    = "WATCHDOG=1"
)

// Extend returns the state that has systemd wait for Ready at least for so long from now on, also where
// the unit's TimeoutStartSec is over before.
func Extend(d time.Duration) string { return fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d", d.Microseconds()) }

// notifyTimeout bounds the wait for room in systemd's socket.
const notifyTimeout = 5 * time.Second

// Unit is the unit of systemd that this process is the main process of.
type Unit struct {
	socket string
	// Watchdog is the time within which systemd wants to hear Alive, 0 for no watchdog
	// (sd_watchdog_enabled(3)).
	Watchdog time.Duration
}

//nolint:gochecknoglobals // what systemd has passed to the process, of which there is one
var passed struct {
	sync.Mutex
	unit Unit
}

// OpenUnit returns the unit of this process, which is asked for nothing where it has none. It takes
// what systemd has passed out of the environment: k8s.io/apiserver reports a process to be ready that is not (it calls SdNotify in
// GenericAPIServer.NonBlockingRun), and processes of Pods are not the unit's main one.
func OpenUnit() Unit {
	passed.Lock()
	defer passed.Unlock()
	if at := os.Getenv("NOTIFY_SOCKET"); at != "" {
		passed.unit = Unit{at, watchdogPeriod()}
		for _, name := range []string{"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} {
			_ = os.Unsetenv(name)
		}
	}
	return passed.unit
}

// Notify reports a state of the unit to systemd.
func (u Unit) Notify(state string) error {
	if u.socket == "" {
		return nil
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Net: "unixgram", Name: u.socket})
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetWriteDeadline(time.Now().Add(notifyTimeout)); err != nil {
		return err
	}
	_, err = conn.Write([]byte(state))
	return err
}

func watchdogPeriod() time.Duration {
	usec, err := strconv.ParseInt(os.Getenv("WATCHDOG_USEC"), 10, 64)
	pid := os.Getenv("WATCHDOG_PID")
	if err != nil || usec <= 0 || pid != "" && pid != strconv.Itoa(os.Getpid()) {
		return 0
	}
	return time.Duration(usec) * time.Microsecond
}
