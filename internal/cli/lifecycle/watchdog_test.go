package lifecycle

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/systemd"
)

// openUnit makes this process that of a unit, whose notifications come to conn.
func openUnit(t *testing.T) (conn *net.UnixConn, unit systemd.Unit) {
	t.Helper()
	at := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: at})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	t.Setenv("NOTIFY_SOCKET", at)
	t.Setenv("WATCHDOG_USEC", strconv.Itoa(int(time.Hour/time.Microsecond)))
	t.Setenv("WATCHDOG_PID", "")
	return conn, systemd.OpenUnit()
}

// hears returns what a unit has notified since the last call.
func hears(t *testing.T, conn *net.UnixConn, unit systemd.Unit) (all string) {
	t.Helper()
	const mark = "MARK=1"
	if err := unit.Notify(mark); err != nil {
		t.Fatal(err)
	}
	for buffer := make([]byte, 64); ; {
		n, err := conn.Read(buffer)
		if err != nil {
			t.Fatal(err)
		}
		if string(buffer[:n]) == mark {
			return all
		}
		all += string(buffer[:n])
	}
}

// systemd hears that a process is alive while its components answer, also when one is late once.
func TestWatchdog(t *testing.T) {
	conn, unit := openUnit(t)
	if unit.Watchdog != time.Hour {
		t.Fatalf("the watchdog's time is %v", unit.Watchdog)
	}
	var failure error
	dog := &watchdog{unit: unit, log: slog.New(slog.DiscardHandler), components: []Component{
		{Name: "without"}, {Name: "server", Alive: func(context.Context) error { return failure }},
	}}
	for i, step := range []struct {
		err  error
		want string
	}{
		{nil, systemd.Alive}, {errors.New("late"), systemd.Alive}, {nil, systemd.Alive},
		{errors.New("late"), systemd.Alive}, {errors.New("late"), ""}, {errors.New("late"), ""}, {nil, systemd.Alive},
	} {
		failure = step.err
		dog.look(t.Context())
		if got := hears(t, conn, unit); got != step.want {
			t.Errorf("look %d: systemd hears %q, want %q", i+1, got, step.want)
		}
	}
}
