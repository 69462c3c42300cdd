package cli

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

// systemd hears that a process is alive while its components answer, also when one is late once.
func TestWatchdog(t *testing.T) {
	at := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: at})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	t.Setenv("NOTIFY_SOCKET", at)
	t.Setenv("WATCHDOG_USEC", strconv.Itoa(int(time.Hour/time.Microsecond)))
	t.Setenv("WATCHDOG_PID", "")
	unit := systemd.OpenUnit()
	if unit.Watchdog != time.Hour {
		t.Fatalf("the watchdog's time is %v", unit.Watchdog)
	}
	var failure error
	dog := &watchdog{unit: unit, log: slog.New(slog.DiscardHandler), components: []component{
		{name: "without"}, {name: "server", alive: func(context.Context) error { return failure }},
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
		dog.notify("MARK=1")
		got := ""
		for buffer := make([]byte, 64); ; {
			n, err := conn.Read(buffer)
			if err != nil {
				t.Fatal(err)
			}
			if string(buffer[:n]) == "MARK=1" {
				break
			}
			got += string(buffer[:n])
		}
		if got != step.want {
			t.Errorf("look %d: systemd hears %q, want %q", i+1, got, step.want)
		}
	}
}
