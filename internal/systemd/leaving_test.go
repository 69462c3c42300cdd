package systemd_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/systemd"
	"github.com/fairlead/fairlead/internal/testbed"
	booted "github.com/fairlead/fairlead/internal/testbed/systemd"
)

// leavingEnv makes this program the process of a unit that writes to a file what Leaving says when it is told to end.
const leavingEnv = "FAIRLEAD_TEST_LEAVING"

func tellLeaving(file string) {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	_ = os.WriteFile(file+".ready", nil, 0o600)
	<-stop
	text := fmt.Sprintln(systemd.Leaving(context.Background()))
	out, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		_, err = out.WriteString(text)
	}
	if err != nil {
		os.Exit(1)
	}
}

// A process that is told to end knows whether systemd starts it again.
func TestLeaving(t *testing.T) {
	file := filepath.Join(t.TempDir(), "leaving")
	m := booted.Boot(t, map[string]string{
		"lb.service": "Environment=" + leavingEnv + "=" + file + "\nExecStart=" + os.Args[0] + "\nRestart=always\nRestartSec=10ms",
	})
	var want strings.Builder
	m.Systemctl("start", "lb.service")
	for _, c := range []struct {
		how  []string
		want bool
	}{
		{[]string{"restart", "lb.service"}, false},
		{[]string{"try-restart", "lb.service"}, false},
		{[]string{"kill", "lb.service"}, false}, // Restart=always
		{[]string{"stop", "lb.service"}, true},
	} {
		testbed.Until(t, "the process", func() error { _, err := os.Stat(file + ".ready"); return err })
		if err := os.Remove(file + ".ready"); err != nil {
			t.Fatal(err)
		}
		m.Systemctl(c.how...)
		fmt.Fprintln(&want, c.want)
		testbed.Until(t, c.how[0]+" to be noticed", func() error {
			got, err := os.ReadFile(file)
			if err == nil && string(got) != want.String() {
				err = errors.New(string(got))
			}
			return err
		})
	}
	if systemd.Leaving(t.Context()) {
		t.Error("a process of no unit is leaving")
	}
}
