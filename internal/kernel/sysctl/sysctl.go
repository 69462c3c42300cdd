// Package sysctl sets kernel parameters.
package sysctl

import (
	"fmt"
	"os"
	"strings"
)

// Set gives a parameter, named with slashes as below /proc/sys, a value, unless
// it has it. Parameters below net/ are those of the calling thread's network
// namespace.
func Set(key, value string) error {
	file := "/proc/sys/" + key
	if b, err := os.ReadFile(file); err == nil && strings.TrimSpace(string(b)) == value {
		return nil
	}
	if err := os.WriteFile(file, []byte(value), 0); err != nil {
		return fmt.Errorf("set %s to %s: %w; set it by hand if /proc/sys is read-only here", strings.ReplaceAll(key, "/", "."), value, err)
	}
	return nil
}
