package corefile

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Bounds of imports: a file that imports itself must not fill the memory.
const (
	maxDepth = 16
	maxWords = 1 << 20
)

// source reads the words of files and replaces imports.
type source struct {
	snippets map[string][]token
	words    int
	files    []string // every file read, and the patterns of imports
}

// read returns the words of a file with its imports replaced.
func (s *source) read(file string, depth int) ([]token, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	words, err := lex(file, string(text))
	if err != nil {
		return nil, err
	}
	return s.expand(words, depth)
}

// expand takes the snippets out of words and replaces each import by the words that it names.
func (s *source) expand(words []token, depth int) ([]token, error) {
	var out []token
	level := 0
	for i := 0; i < len(words); i++ {
		w := words[i]
		name, isSnippet := snippetName(words[i:])
		switch {
		case level == 0 && w.first && isSnippet:
			end, err := closing(words, i+1)
			if err != nil {
				return nil, err
			}
			if _, ok := s.snippets[name]; ok {
				return nil, w.pos.errorf("there is already a snippet %q", name)
			}
			s.snippets[name] = words[i+2 : end]
			i = end
			continue
		case w.text == "import" && w.first:
			if i+1 == len(words) || words[i+1].first {
				return nil, w.pos.errorf("import needs a snippet, a file or a pattern")
			}
			if i+2 < len(words) && !words[i+2].first {
				return nil, w.pos.errorf("import takes one argument, a snippet, a file or a pattern")
			}
			imported, err := s.imported(words[i+1], depth)
			if err != nil {
				return nil, err
			}
			out = append(out, imported...)
			i++
			continue
		case w.text == "{":
			level++
		case w.text == "}":
			level--
		}
		out = append(out, w)
		if s.words++; s.words > maxWords {
			return nil, w.pos.errorf("the files have more than %d words with their imports", maxWords)
		}
	}
	return out, nil
}

// snippetName returns the name of the snippet that begins with words.
func snippetName(words []token) (string, bool) {
	if len(words) < 2 || words[1].text != "{" {
		return "", false
	}
	name, ok := strings.CutPrefix(words[0].text, "(")
	if !ok {
		return "", false
	}
	return strings.CutSuffix(name, ")")
}

// closing returns the index of the brace that closes the one at words[open].
func closing(words []token, open int) (int, error) {
	level := 0
	for i := open; i < len(words); i++ {
		switch words[i].text {
		case "{":
			level++
		case "}":
			if level--; level == 0 {
				return i, nil
			}
		}
	}
	return 0, words[open].pos.errorf("the brace that opens here is never closed")
}

// imported returns the words that an import names: a snippet's, or of the files
// that match a pattern relative to the importing file. A pattern may match nothing.
func (s *source) imported(what token, depth int) ([]token, error) {
	if depth >= maxDepth {
		return nil, what.pos.errorf("imports are nested more than %d deep; does %q import itself?", maxDepth, what.text)
	}
	if words, ok := s.snippets[what.text]; ok {
		words = slices.Clone(words)
		if len(words) > 0 {
			words[0].first = true
		}
		return s.expand(words, depth+1)
	}
	pattern := what.text
	if pattern == "" {
		return nil, what.pos.errorf("import needs a snippet, a file or a pattern; the argument is empty")
	}
	if !filepath.IsAbs(pattern) {
		pattern = filepath.Join(filepath.Dir(what.pos.File), pattern)
	}
	s.files = append(s.files, pattern)
	matches, err := filepath.Glob(pattern)
	if err != nil {
		return nil, what.pos.errorf("import %s: %w", what.text, err)
	}
	if len(matches) == 0 && !strings.ContainsAny(pattern, "*?[") {
		return nil, what.pos.errorf("cannot import %q: there is no such snippet above, and no such file", what.text)
	}
	var out []token
	for _, file := range matches {
		words, err := s.read(file, depth+1)
		if err != nil {
			return nil, what.pos.errorf("import: %w", err)
		}
		if len(words) > 0 {
			words[0].first = true
		}
		out = append(out, words...)
	}
	return out, nil
}

// line is one line of a directive, or a directive itself.
type line struct {
	pos  Pos
	name string
	args []string
	body []line // between its braces
}

// block is a server block as it is written.
type block struct {
	pos        Pos
	keys       []token
	directives []line
}

// parse divides words into server blocks.
func parse(words []token) ([]block, error) {
	var out []block
	for at := 0; at < len(words); {
		b := block{pos: words[at].pos}
		at = b.readKeys(words, at)
		if len(b.keys) == 0 {
			return nil, b.pos.errorf("a server block needs a zone before its brace; the usual one is .:53")
		}
		if at == len(words) {
			return append(out, b), nil
		}
		braces := words[at].text == "{"
		end := len(words)
		if braces {
			var err error
			if end, err = closing(words, at); err != nil {
				return nil, err
			}
			at++
		}
		var err error
		if b.directives, err = readLines(words[at:end], true); err != nil {
			return nil, err
		}
		out = append(out, b)
		if at = end; braces {
			at++
		}
	}
	return out, nil
}

// readKeys reads the zones before a block and returns the index behind them. A comma at the
// end of a zone means that another one follows, maybe on the next line.
func (b *block) readKeys(words []token, at int) int {
	more := false
	for start := at; at < len(words) && words[at].text != "{"; at++ {
		w := words[at]
		if at > start && w.first && !more {
			return at
		}
		w.text, more = strings.CutSuffix(w.text, ",")
		for part := range strings.SplitSeq(w.text, ",") {
			if part != "" {
				b.keys = append(b.keys, token{text: part, pos: w.pos})
			}
		}
	}
	return at
}

// readLines reads directives, or with deep the lines between the braces of one too.
func readLines(words []token, deep bool) ([]line, error) {
	var out []line
	for at := 0; at < len(words); {
		l := line{pos: words[at].pos, name: words[at].text}
		if l.name == "{" || l.name == "}" {
			return nil, l.pos.errorf("a brace stands where a name is expected")
		}
		for at++; at < len(words) && !words[at].first && words[at].text != "{"; at++ {
			l.args = append(l.args, words[at].text)
		}
		if at < len(words) && words[at].text == "{" {
			if !deep {
				return nil, words[at].pos.errorf("%s takes no block", l.name)
			}
			end, err := closing(words, at)
			if err != nil {
				return nil, err
			}
			if l.body, err = readLines(words[at+1:end], false); err != nil {
				return nil, err
			}
			at = end + 1
		}
		out = append(out, l)
	}
	return out, nil
}

// errArgs is the error of a line with the wrong number of arguments.
func (l line) errArgs(want string) error {
	return l.pos.errorf("%s: got %d arguments; want %s", l.name, len(l.args), want)
}

// errProperty is the error of a line in a block that the plugin does not have.
func (l line) errProperty(plugin, allowed string) error {
	return l.pos.errorf("%s: unknown property %q; want one of %s", plugin, l.name, allowed)
}

// want checks the number of arguments.
func (l line) want(least, most int, what string) error {
	if len(l.args) < least || most >= 0 && len(l.args) > most {
		return l.errArgs(what)
	}
	return nil
}

// noBlock refuses a block.
func (l line) noBlock() error {
	if len(l.body) > 0 {
		return l.body[0].pos.errorf("%s takes no block", l.name)
	}
	return nil
}

// fingerprint describes the contents of the files, to find out whether they have changed.
func fingerprint(files []string) (string, error) {
	var out strings.Builder
	for _, pattern := range files {
		matches, err := filepath.Glob(pattern)
		if err != nil {
			return "", err
		}
		for _, file := range matches {
			text, err := os.ReadFile(file)
			if err != nil {
				return "", err
			}
			fmt.Fprintf(&out, "%s\x00%d\x00%s\x00", file, len(text), text)
		}
	}
	return out.String(), nil
}
