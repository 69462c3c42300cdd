package uicmd

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
)

// The browser has a session of its own, so that Ctrl-C in the terminal of 'fairlead ui' does not end it.
func TestBrowserOutlivesCtrlC(t *testing.T) {
	dir := t.TempDir()
	script, out := filepath.Join(dir, "browser"), filepath.Join(dir, "out")
	text := "#!/bin/sh\nread pid name state parent group session rest < /proc/$$/stat\n" +
		"echo \"$pid $group $session $1\" > " + out + ".part\nmv " + out + ".part " + out + "\n"
	if err := os.WriteFile(script, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("BROWSER", script)
	if err := new(uiFlags).open("https://example.com/ui"); err != nil {
		t.Fatal(err)
	}
	testbed.Until(t, "the browser to start", func() error {
		b, err := os.ReadFile(out)
		if err != nil {
			return err
		}
		words := strings.Fields(string(b))
		if len(words) != 4 || words[0] != words[1] || words[1] != words[2] || words[3] != "https://example.com/ui" {
			return errors.New("process, group, session and URL are " + string(b))
		}
		return nil
	})
}
