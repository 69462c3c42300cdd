package corefile

import (
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// integer reads argument i of a line as a number from least to most.
func (l line) integer(i, least, most int) (int, error) {
	n, err := strconv.Atoi(l.args[i])
	if err != nil || n < least || n > most {
		return 0, l.pos.errorf("%s: %q is not a number from %d to %d", l.name, l.args[i], least, most)
	}
	return n, nil
}

// duration reads argument i of a line as a duration of at least 0.
func (l line) duration(i int) (time.Duration, error) {
	d, err := time.ParseDuration(l.args[i])
	if err != nil || d < 0 {
		return 0, l.pos.errorf("%s: %q is not a duration of 0 or more such as 30s", l.name, l.args[i])
	}
	return d, nil
}

// one returns the only argument of a line.
func (l line) one(what string) (string, error) {
	if err := l.want(1, 1, what); err != nil {
		return "", err
	}
	return l.args[0], nil
}

// oneDuration reads the only argument of a line as a duration.
func (l line) oneDuration() (time.Duration, error) {
	if err := l.want(1, 1, "one duration"); err != nil {
		return 0, err
	}
	return l.duration(0)
}

// oneInteger reads the only argument of a line as a number.
func (l line) oneInteger(least, most int) (int, error) {
	if err := l.want(1, 1, "one number"); err != nil {
		return 0, err
	}
	return l.integer(0, least, most)
}

// choice returns the only argument, which must be one of allowed.
func (l line) choice(allowed ...string) (string, error) {
	if len(l.args) != 1 || !slices.Contains(allowed, l.args[0]) {
		return "", l.pos.errorf("%s: %q is not one of %s", l.name, strings.Join(l.args, " "), strings.Join(allowed, ", "))
	}
	return l.args[0], nil
}

// flag checks that a property has no arguments.
func (l line) flag() error { return l.want(0, 0, "none") }

// fall reads a line "fallthrough [ZONE...]".
func (b *Block) fall(l line) (Fall, error) {
	if len(l.args) == 0 {
		return Fall{Zones: []string{"."}}, nil
	}
	zones, err := b.zonesOr(l, l.args)
	return Fall{Zones: zones}, err
}

// path returns a path relative to the directory that the plugin root names.
func (b *Block) path(p string) string {
	if filepath.IsAbs(p) || b.root == "" {
		return p
	}
	return filepath.Join(b.root, p)
}

// properties calls the function of each line in a directive's block.
func (l line) properties(known map[string]func(line) error) error {
	for _, p := range l.body {
		set, ok := known[p.name]
		if !ok {
			names := make([]string, 0, len(known))
			for n := range known {
				names = append(names, n)
			}
			slices.Sort(names)
			return p.errProperty(l.name, strings.Join(names, ", "))
		}
		if err := set(p); err != nil {
			return err
		}
	}
	return nil
}

// assign returns a property that stores what read returns.
func assign[T any](to *T, read func(line) (T, error)) func(line) error {
	return func(l line) (err error) {
		*to, err = read(l)
		return err
	}
}

// set returns a property without arguments that is then true.
func set(to *bool) func(line) error {
	return func(l line) error {
		*to = true
		return l.flag()
	}
}
