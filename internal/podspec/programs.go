package podspec

import (
	"encoding/hex"
	"fmt"
	"path/filepath"
	"strings"
)

// maxPrograms bounds the lines of svc.ProgramsAnnotation.
const maxPrograms = 16

// Program is an executable file of the machine in a directory that Pods which are not privileged do not see. A node
// shows it to a Pod that knows its content.
type Program struct {
	// Path is absolute and clean.
	Path string
	// SHA256 is the hash of the content, in lower-case hex.
	SHA256 string
}

// Line returns the program as sha256sum prints it.
func (p Program) Line() string { return p.SHA256 + "  " + p.Path }

// ParsePrograms parses the value of svc.ProgramsAnnotation: what sha256sum prints, a line for each program.
func ParsePrograms(value string) (out []Program, err error) {
	for line := range strings.Lines(value) {
		line = strings.TrimRight(line, "\r\n")
		if strings.TrimSpace(line) == "" {
			continue
		}
		sum, path, ok := strings.Cut(line, "  ")
		if raw, err := hex.DecodeString(sum); !ok || err != nil || len(raw) != 32 || strings.ToLower(sum) != sum {
			return nil, fmt.Errorf("%q: want the SHA-256 in hex, two spaces and the path of a program, as sha256sum prints them", line)
		}
		if !filepath.IsAbs(path) || filepath.Clean(path) != path {
			return nil, fmt.Errorf("%q: want an absolute path without . and .. in it", path)
		}
		if len(out) == maxPrograms {
			return nil, fmt.Errorf("want at most %d programs", maxPrograms)
		}
		out = append(out, Program{Path: path, SHA256: sum})
	}
	return out, nil
}
