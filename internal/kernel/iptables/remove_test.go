package iptables

import (
	"os/exec"
	"testing"
)

// A caller can tell whether Each looks at anything.
func TestInstalled(t *testing.T) {
	called := false
	if err := Each(func(*Tool) error { called = true; return nil }); err != nil {
		t.Fatal(err)
	}
	if _, err := exec.LookPath("iptables"); err == nil && !called || Installed() != called {
		t.Errorf("called is %v, installed %v; LookPath: %v", called, Installed(), err)
	}
}
