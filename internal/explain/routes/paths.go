package routes

import (
	"crypto/sha256"
	"encoding/binary"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/hostpath"
)

// Bounds of the work with expressions, in instructions that are looked at: a tenant's expressions must not hold up a plan, and must
// leave something for others. mostWork is for a plan, and mostOfHost for the matches of a host: to find paths, and again to ask for
// these. mostInsts bounds the instructions of all matches of a host.
const (
	mostWork   = 30_000_000
	mostOfHost = 3_000_000
	mostInsts  = 20_000
)

// budget is the work that is left to a plan.
type budget struct {
	left int
	// over reports whether the time of the plan is over.
	over func() bool
}

// take takes work. It reports whether so much was left.
func (b *budget) take(n int) bool {
	b.left -= n
	return b.left >= 0 && !b.over()
}

// letters are the characters of examples, in the order in which they are tried. A path has other ones encoded.
const letters = "xa0A-_bcdefghijklmnopqrstuvwyzBCDEFGHIJKLMNOPQRSTUVWXYZ123456789.~!$&'()*+,;=:@/|[]{}^<>`\""

// Bounds of what paths of rules have beside letters: of these, and of the characters that are looked at to find them.
const (
	mostExtra = 64
	mostEnds  = 256
)

// explorer finds paths by which matches can be told apart: for each set of matches that some path is for, but for no other match, one
// such path. It walks through the states of all expressions at once, so that what it finds is complete unless a bound ends the walk.
type explorer struct {
	progs []*syntax.Prog
	base  []uint32 // of the instructions of each program, and the end of the last
	// alpha are the characters of examples. An encoded one has three.
	alpha []string
	loose []uint32 // where programs start that may match anywhere in a path
	left  int      // work for these matches
	all   *budget
	// users is how many instructions the expressions of users have.
	users int
	// sound is false if an expression has what the walk does not follow.
	sound bool
	// marks are the instructions that follow has seen: they have the number of the call.
	marks []uint32
	call  uint32
}

// spend takes work. It reports whether so much was left.
func (e *explorer) spend(n int) bool {
	e.left -= n
	return e.all.take(n) && e.left >= 0
}

// expressionOf returns an expression of the paths of a match, "" if it does not look at the path as a whole.
func expressionOf(m *gateway.Match) string {
	switch {
	case m.Last, m.Call != nil:
		return ""
	case m.Regex != nil:
		return m.Regex.String()
	case m.Exact:
		return "^" + regexp.QuoteMeta(m.Path) + "$"
	case m.Begins:
		return "^" + regexp.QuoteMeta(m.Path)
	}
	return "^" + regexp.QuoteMeta(strings.TrimSuffix(m.Path, "/")) + "(?:/|$)"
}

// newExplorer returns an explorer for the paths of matches.
func newExplorer(all []*gateway.Match, work *budget) *explorer {
	e := &explorer{left: mostOfHost, all: work, sound: true, base: []uint32{0}}
	seen := map[string]bool{}
	regexes := 0
	for _, ofRegex := range []bool{true, false} { // the signature of a character begins with the expressions of users
		for _, f := range all {
			text := expressionOf(f)
			if text == "" || seen[text] || (f.Regex != nil) != ofRegex || !e.sound {
				continue
			}
			seen[text] = true
			e.sound = e.compile(text)
		}
		if ofRegex {
			regexes, e.users = len(e.progs), int(e.base[len(e.base)-1])
		}
	}
	e.marks = make([]uint32, e.base[len(e.base)-1])
	if e.sound {
		e.alphabet(regexes, e.extra(all))
	}
	return e
}

// compile adds an expression. It returns false if there is no place for it.
func (e *explorer) compile(text string) bool {
	tree, err := syntax.Parse(text, syntax.Perl)
	if err != nil {
		return false
	}
	prog, err := syntax.Compile(tree.Simplify())
	from := e.base[len(e.base)-1]
	if err != nil || int(from)+len(prog.Inst) >= mostInsts || !e.spend(len(prog.Inst)*len(letters)) {
		return false
	}
	if prog.StartCond()&syntax.EmptyBeginText == 0 {
		e.loose = append(e.loose, from+uint32(prog.Start)) //nolint:gosec // mostInsts bounds it
	}
	e.progs = append(e.progs, prog)
	e.base = append(e.base, from+uint32(len(prog.Inst))+1) //nolint:gosec // mostInsts bounds it
	return true
}

var encoded = regexp.MustCompile("%[0-9A-F]{2}")

// extra returns the characters of paths that are no letters, as far as a request can have them.
func (e *explorer) extra(all []*gateway.Match) (out []string) {
	seen := map[string]bool{}
	add := func(c string) {
		if canonical, ok := hostpath.Path("/" + c); ok && canonical == "/"+c && !seen[c] {
			seen[c] = true
			out = append(out, c)
		}
	}
	for _, f := range all {
		for _, c := range encoded.FindAllString(f.Path, -1) {
			add(c)
		}
		for _, c := range f.Path {
			if f.Regex == nil && c >= utf8.RuneSelf {
				add(string(c))
			}
		}
		if len(out) > mostExtra {
			e.sound = false
			return out[:mostExtra]
		}
	}
	return out
}

// sign returns which instructions take a character.
func (e *explorer) sign(c rune, progs []*syntax.Prog) string {
	var out strings.Builder
	for _, p := range progs {
		for i := range p.Inst {
			if in := &p.Inst[i]; isRune(in.Op) && in.MatchRune(c) {
				out.WriteByte('1')
			} else {
				out.WriteByte('0')
			}
		}
	}
	return out.String()
}

// alphabet takes one of several characters that no expression tells apart. The first programs are the ones of users.
func (e *explorer) alphabet(regexes int, extra []string) {
	seen, usable := map[string]bool{}, map[string]bool{}
	for _, c := range letters {
		key := e.sign(c, e.progs)
		usable[key[:len(e.sign(c, e.progs[:regexes]))]] = true
		if !seen[key] || c == '/' || c == '.' {
			seen[key] = true
			e.alpha = append(e.alpha, string(c))
		}
	}
	e.alpha = append(e.alpha, extra...)
	e.sound = e.sound && usable[e.sign('%', e.progs[:regexes])] // else an expression is about encoded characters
	ends := map[rune]bool{}
	for i, p := range e.progs {
		for j := range p.Inst {
			in := &p.Inst[j]
			const words = syntax.EmptyWordBoundary | syntax.EmptyNoWordBoundary
			e.sound = e.sound && (in.Op != syntax.InstEmptyWidth || syntax.EmptyOp(in.Arg)&words == 0)
			for _, end := range in.Rune {
				for c := end - 1; i < regexes && c <= end+1; c++ {
					if c >= utf8.RuneSelf && c <= unicode.MaxRune && len(ends) <= mostEnds {
						ends[c] = true
					}
				}
			}
		}
	}
	e.sound = e.sound && len(ends) <= mostEnds
	for c := range ends { // an expression may be about characters that are no letters
		e.sound = e.sound && e.spend(e.users) && usable[e.sign(c, e.progs[:regexes])]
	}
}

func isRune(op syntax.InstOp) bool {
	return op == syntax.InstRune || op == syntax.InstRune1 || op == syntax.InstRuneAny || op == syntax.InstRuneAnyNotNL
}

// segment is what the last segment of a path is so far: dot segments and empty ones are in no canonical path.
type segment byte

const (
	inSegment segment = iota
	begun
	dot
	twoDots
)

func (s segment) next(c rune) (segment, bool) {
	switch {
	case c == '/':
		return begun, s == inSegment
	case c == '.' && s == begun:
		return dot, true
	case c == '.' && s == dot:
		return twoDots, true
	}
	return inSegment, true
}

// state is where a walk is: the instructions that come next, with the end of a program for one that has matched whatever follows.
type state struct {
	pcs  []uint32
	at   segment
	path string
}

// key is the same for states from which the same follows. It does not grow with them.
func (s *state) key() [sha256.Size]byte {
	out := make([]byte, 1, 1+4*len(s.pcs))
	out[0] = byte(s.at)
	for _, pc := range s.pcs {
		out = binary.BigEndian.AppendUint32(out, pc)
	}
	return sha256.Sum256(out)
}

// mostPath bounds the length of an example.
const mostPath = 512

// paths returns the examples, the shortest first, and whether they are all.
func (e *explorer) paths() (out []string, complete bool) {
	if !e.sound && len(e.alpha) == 0 {
		return nil, false
	}
	first := &state{at: inSegment}
	for i, p := range e.progs {
		first.pcs = append(first.pcs, e.base[i]+uint32(p.Start)) //nolint:gosec // mostInsts bounds it
	}
	seen, told, refused := map[[sha256.Size]byte]bool{}, map[string]bool{}, map[string]bool{}
	for queue := []*state{first}; len(queue) > 0; queue = queue[1:] {
		s := queue[0]
		queue[0] = nil
		if s.path != "" && (s.at == inSegment || s.at == begun) {
			taken := e.taken(s)
			if canonical, ok := hostpath.Path(s.path); !ok || canonical != s.path {
				refused[taken] = true
			} else if !told[taken] {
				told[taken] = true
				out = append(out, s.path)
			}
		}
		from := e.follow(s.pcs, s.path == "", false)
		for _, c := range e.alpha {
			at, ok := s.at, true
			for _, r := range c {
				at, ok = at.next(r)
			}
			if !ok || s.path == "" && c != "/" {
				continue
			}
			if !e.spend(len(from) + 1) {
				return out, false
			}
			next := &state{pcs: e.step(from, c), at: at, path: s.path + c}
			key := next.key()
			if seen[key] {
				continue
			}
			if !e.spend(len(next.pcs)+len(next.path)) || len(next.path) > mostPath {
				return out, false
			}
			seen[key] = true
			queue = append(queue, next)
		}
	}
	for taken := range refused { // else another path may be for the same matches
		e.sound = e.sound && told[taken]
	}
	return out, e.sound
}

// taken returns the programs that match the path of a state, as a key.
func (e *explorer) taken(s *state) string {
	var out []byte
	for _, pc := range e.follow(s.pcs, false, true) {
		if i := e.prog(pc); e.ended(pc, i) {
			out = binary.BigEndian.AppendUint32(out, uint32(i)) //nolint:gosec // mostInsts bounds it
		}
	}
	return string(out)
}

// prog returns the program of an instruction, and ended whether it is the end of it.
func (e *explorer) prog(pc uint32) int {
	i, exact := slices.BinarySearch(e.base, pc)
	if exact {
		return i
	}
	return i - 1
}

func (e *explorer) ended(pc uint32, prog int) bool { return pc == e.base[prog+1]-1 }

// follow returns what is reached from instructions without a character, at the beginning or the end of the path or not, in order.
func (e *explorer) follow(pcs []uint32, begin, end bool) (out []uint32) {
	var flags syntax.EmptyOp
	if begin {
		flags |= syntax.EmptyBeginText | syntax.EmptyBeginLine
	}
	if end {
		flags |= syntax.EmptyEndText | syntax.EmptyEndLine
	}
	e.call++
	waiting := slices.Clone(pcs)
	if !begin {
		waiting = append(waiting, e.loose...)
	}
	var reached []uint32
	mark := func(pc uint32) bool {
		if e.marks[pc] == e.call {
			return false
		}
		e.marks[pc] = e.call
		reached = append(reached, pc)
		return true
	}
	for len(waiting) > 0 {
		pc := waiting[len(waiting)-1]
		waiting = waiting[:len(waiting)-1]
		if !mark(pc) {
			continue
		}
		i := e.prog(pc)
		if e.ended(pc, i) {
			continue
		}
		in := &e.progs[i].Inst[pc-e.base[i]]
		switch in.Op {
		case syntax.InstAlt, syntax.InstAltMatch:
			waiting = append(waiting, e.base[i]+in.Out, e.base[i]+in.Arg)
		case syntax.InstCapture, syntax.InstNop:
			waiting = append(waiting, e.base[i]+in.Out)
		case syntax.InstEmptyWidth:
			if syntax.EmptyOp(in.Arg)&^flags == 0 {
				waiting = append(waiting, e.base[i]+in.Out)
			}
		case syntax.InstMatch:
			mark(e.base[i+1] - 1)
		}
	}
	e.spend(len(reached))
	for _, pc := range reached {
		i := e.prog(pc)
		if last := e.base[i+1] - 1; pc == last || e.marks[last] != e.call {
			out = append(out, pc)
		}
	}
	slices.Sort(out)
	return out
}

// step returns what comes after a character, which may be encoded.
func (e *explorer) step(from []uint32, c string) (out []uint32) {
	for at, r := range c {
		if at > 0 {
			from = e.follow(out, false, false)
		}
		out = nil
		for _, pc := range from {
			i := e.prog(pc)
			if e.ended(pc, i) {
				out = append(out, pc)
				continue
			}
			if in := &e.progs[i].Inst[pc-e.base[i]]; isRune(in.Op) && in.MatchRune(r) {
				out = append(out, e.base[i]+in.Out)
			}
		}
		slices.Sort(out)
		out = slices.Compact(out)
	}
	return out
}
