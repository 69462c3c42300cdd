package corefile

import (
	"regexp"
	"strings"
	"time"
)

// File serves zones from a file (RFC 1035, section 5).
type File struct {
	Path   string
	Zones  []string
	Reload time.Duration // 0: never
	Fall   Fall
}

// PluginName is the name of the directive.
func (*File) PluginName() string { return "file" }

// defaultFileReload is how often files of zones are looked at.
const defaultFileReload = time.Minute

func parseFile(b *Block, l line) (Plugin, error) {
	if err := l.want(1, -1, "FILE [ZONE...]"); err != nil {
		return nil, err
	}
	f := &File{Path: b.path(l.args[0]), Reload: defaultFileReload}
	var err error
	if f.Zones, err = b.zonesOr(l, l.args[1:]); err != nil {
		return nil, err
	}
	return f, l.properties(map[string]func(line) error{
		"reload":      assign(&f.Reload, line.oneDuration),
		"fallthrough": assign(&f.Fall, b.fall),
		"upstream":    func(line) error { return nil },
	})
}

// Auto serves the zones of all files in a directory whose name matches.
type Auto struct {
	Directory string
	Pattern   *regexp.Regexp
	Origin    string // with {1} for the first group of Pattern
	Zones     []string
	Reload    time.Duration
	Fall      Fall
}

// PluginName is the name of the directive.
func (*Auto) PluginName() string { return "auto" }

func parseAuto(b *Block, l line) (Plugin, error) {
	a := &Auto{Pattern: regexp.MustCompile(`db\.(.*)`), Origin: "{1}", Reload: defaultFileReload}
	var err error
	if a.Zones, err = b.zonesOr(l, l.args); err != nil {
		return nil, err
	}
	err = l.properties(map[string]func(line) error{
		"reload":      assign(&a.Reload, line.oneDuration),
		"fallthrough": assign(&a.Fall, b.fall),
		"upstream":    func(line) error { return nil },
		"directory": func(p line) (err error) {
			if len(p.args) != 1 && len(p.args) != 3 {
				return p.errArgs("DIRECTORY [REGEXP ORIGIN]")
			}
			a.Directory = b.path(p.args[0])
			if len(p.args) == 3 {
				a.Origin = strings.ReplaceAll(strings.ReplaceAll(p.args[2], "${", "{"), "$1", "{1}")
				a.Pattern, err = p.regexp(p.args[1])
			}
			return err
		},
	})
	if err == nil && a.Directory == "" {
		err = l.pos.errorf("auto: the property directory is missing")
	}
	return a, err
}
