package iptables

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"
)

// reader understands what iptables-save prints.
type reader struct {
	table func(name string) // may be nil
	chain func(name string)
	// policy receives the policy of each chain, - for a program's own one; it may be nil.
	policy func(name, policy string)
	rule   func(chain, line string)
	// unread receives the program's error for a table that it cannot read; nil
	// makes that an error.
	unread func(line string)
}

// lineBytes bounds a line: iptables takes no longer ones itself.
const lineBytes = 1 << 20

func (r *reader) read(in *bufio.Reader) error {
	for {
		line, err := readLine(in)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch {
		case line == "", line == "COMMIT":
		case line[0] == '*':
			if r.table != nil {
				r.table(line[1:])
			}
		case line[0] == '#':
			// "# Table `nat' is incompatible, use 'nft' tool."
			if !strings.Contains(line, "is incompatible") {
				continue
			}
			if r.unread == nil {
				return fmt.Errorf("output: %.200q", line)
			}
			r.unread(line)
		case line[0] == ':':
			name, rest, ok := strings.Cut(line[1:], " ")
			if !ok || name == "" {
				return fmt.Errorf("line %.80q names no chain", line)
			}
			if r.chain != nil {
				r.chain(name)
			}
			if r.policy != nil {
				policy, _, _ := strings.Cut(rest, " ")
				r.policy(name, policy)
			}
		case strings.HasPrefix(line, "-A "):
			name, _, _ := strings.Cut(line[3:], " ")
			if name == "" {
				return fmt.Errorf("line %.80q names no chain", line)
			}
			r.rule(name, line)
		default:
			return fmt.Errorf("line %.80q is not understood", line)
		}
	}
}

// readLine returns a line without its end; the last one may lack it.
func readLine(in *bufio.Reader) (string, error) {
	var line strings.Builder
	for {
		part, err := in.ReadSlice('\n')
		line.Write(part)
		switch {
		case err == nil, errors.Is(err, io.EOF) && line.Len() > 0:
			return strings.TrimSuffix(line.String(), "\n"), nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return "", err
		case line.Len() > lineBytes:
			return "", fmt.Errorf("a line of more than %d bytes", lineBytes)
		}
	}
}
