package systemd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"
)

// disableTimeout bounds the end of one unit; systemd kills it after 90 s.
const disableTimeout = 3 * time.Minute

// Disable stops units, in order, and lets none of them start with the machine. It does
// nothing where systemd does not run, or knows no such unit.
func Disable(ctx context.Context, units ...string) error {
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		return nil
	}
	for _, unit := range units {
		state, err := systemctl(ctx, "show", "--value", "--property", "LoadState", unit)
		if err != nil {
			return err
		}
		if state == "not-found" {
			continue
		}
		if _, err := systemctl(ctx, "disable", "--now", unit); err != nil {
			return err
		}
	}
	return nil
}

func systemctl(ctx context.Context, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, disableTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, "systemctl", args...).CombinedOutput()
	text := strings.TrimSpace(string(out))
	if errors.Is(err, exec.ErrNotFound) {
		return "", fmt.Errorf("systemd runs, but %w", err)
	}
	if err != nil {
		return "", fmt.Errorf("systemctl %s: %w: %s", strings.Join(args, " "), err, text)
	}
	return text, nil
}
