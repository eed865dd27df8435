package archtest

import (
	"go/ast"
	"go/token"
	"go/types"
	"slices"
	"strings"
)

// This file has the rule that package-level variables of a pure package are constant:
//
//   - An exported variable is an error (a sentinel).
//   - After its declaration a variable is not assigned to, its address is not taken, and it is not
//     changed through an index, a field or a method with a pointer receiver.
//   - A variable that gives access to shared memory (a map, a slice, or a value with a map or slice) is
//     only read in place: indexed, ranged over, measured, compared with nil, or passed to a function
//     that is known not to keep or change its argument.
//   - A variable is not a pointer, a channel, or an interface other than error.
//
// The rule does not restrict the initialiser of a variable.

// readers lists the functions that do not change or keep a map or slice argument.
var readers = []string{
	"bytes.", "strings.", // neither package writes to its arguments
	"slices.All", "slices.BinarySearch", "slices.BinarySearchFunc", "slices.Clone", "slices.Compare",
	"slices.Concat", "slices.Contains", "slices.ContainsFunc", "slices.Equal", "slices.Index", "slices.IndexFunc",
	"slices.Max", "slices.Min", "slices.Backward", "slices.Values", "slices.IsSorted",
	"maps.All", "maps.Clone", "maps.Equal", "maps.Keys", "maps.Values",
}

// declared checks the declaration of a package-level variable.
func (c *purityCheck) declared(id *ast.Ident, v *types.Var) {
	if id.Name == "_" {
		return // an assertion about types, not a variable
	}
	if v.Exported() && !isError(v.Type()) {
		c.report(id.Pos(), whyState, "exported variable %s that is not an error", id.Name)
	}
	switch v.Type().Underlying().(type) {
	case *types.Pointer, *types.Chan:
		c.report(id.Pos(), whyState, "variable %s is a pointer or channel", id.Name)
	case *types.Interface:
		if !isError(v.Type()) {
			c.report(id.Pos(), whyState, "variable %s is an interface other than error", id.Name)
		}
	}
}

// used checks a use of a package-level variable of this or another package.
func (c *purityCheck) used(id *ast.Ident, v *types.Var) {
	// Climb from the name to the longest expression that still denotes the variable or a part of the
	// variable: v, pkg.v, v.f, v[i].f, (v).
	var expr ast.Expr = id
	i := 1
climb:
	for ; ; i++ {
		switch p := c.parent(i).(type) {
		case *ast.ParenExpr:
			expr = p
		case *ast.SelectorExpr:
			if p.Sel != id && p.X != expr {
				break climb
			}
			if p.Sel != id {
				if s := c.pkg.TypesInfo.Selections[p]; s != nil && s.Kind() != types.FieldVal {
					c.method(id, s, expr)
					return
				}
			}
			expr = p
		case *ast.IndexExpr:
			if p.X != expr {
				break climb
			}
			expr = p
		default:
			break climb
		}
	}
	t := c.pkg.TypesInfo.TypeOf(expr)

	switch p := c.parent(i).(type) {
	case *ast.AssignStmt:
		if p.Tok != token.DEFINE && slices.Contains(p.Lhs, expr) {
			c.report(id.Pos(), whyState, "assignment to %s", id.Name)
			return
		}
	case *ast.IncDecStmt:
		c.report(id.Pos(), whyState, "assignment to %s", id.Name)
		return
	case *ast.UnaryExpr:
		if p.Op == token.AND {
			c.report(id.Pos(), whyState, "address of %s", id.Name)
			return
		}
	case *ast.RangeStmt:
		if p.Key == expr || p.Value == expr {
			c.report(id.Pos(), whyState, "assignment to %s", id.Name)
			return
		}
		if p.X == expr {
			if v, ok := p.Value.(*ast.Ident); ok && v.Name != "_" && c.sharesWhatItHolds(t) {
				c.report(id.Pos(), whyState, "%s escapes: the loop variable shares what it holds", id.Name)
			}
			return
		}
	case *ast.SliceExpr:
		if _, isArray := t.Underlying().(*types.Array); isArray {
			c.report(id.Pos(), whyState, "address of %s", id.Name)
			return
		}
	case *ast.BinaryExpr:
		return
	case *ast.CallExpr:
		if p.Fun == expr || c.readsOnly(p, expr) {
			return
		}
	}
	if shares(t) {
		c.report(id.Pos(), whyState, "%s escapes: what gets it could change it", id.Name)
	}
}

// method checks a method selected on expr, which is a part of the variable.
func (c *purityCheck) method(id *ast.Ident, s *types.Selection, expr ast.Expr) {
	f, ok := s.Obj().(*types.Func)
	if !ok {
		return
	}
	receiver := f.Signature().Recv().Type()
	if _, isPointer := receiver.Underlying().(*types.Pointer); isPointer && !isError(c.pkg.TypesInfo.TypeOf(expr)) {
		c.report(id.Pos(), whyState, "method %s of %s, which could change it", f.Name(), id.Name)
	}
}

// readsOnly reports whether the call only reads the argument.
func (c *purityCheck) readsOnly(call *ast.CallExpr, argument ast.Expr) bool {
	if id, ok := ast.Unparen(call.Fun).(*ast.Ident); ok {
		if b, ok := c.pkg.TypesInfo.Uses[id].(*types.Builtin); ok {
			switch b.Name() {
			case "len", "cap":
				return true
			case "append", "copy":
				return call.Args[0] != argument
			}
			return false
		}
	}
	f := c.function(call)
	if f == nil || f.Pkg() == nil {
		return false
	}
	name := f.Pkg().Path() + "." + f.Name()
	return slices.ContainsFunc(readers, func(r string) bool {
		return r == name || strings.HasSuffix(r, ".") && strings.HasPrefix(name, r)
	})
}

// sharesWhatItHolds reports whether an element of a container of type t shares memory with the
// container.
func (c *purityCheck) sharesWhatItHolds(t types.Type) bool {
	switch t := t.Underlying().(type) {
	case *types.Array:
		return shares(t.Elem())
	case *types.Slice:
		return shares(t.Elem())
	case *types.Map:
		return shares(t.Elem())
	}
	return false
}

// shares reports whether a copy of a value of type t gives access to memory of the original. Strings,
// functions and errors count as constant.
func shares(t types.Type) bool {
	if isError(t) {
		return false
	}
	switch t := t.Underlying().(type) {
	case *types.Map, *types.Slice, *types.Pointer, *types.Chan, *types.Interface:
		return true
	case *types.Array:
		return shares(t.Elem())
	case *types.Struct:
		for f := range t.Fields() {
			if shares(f.Type()) {
				return true
			}
		}
	}
	return false
}

func isError(t types.Type) bool { return types.Identical(t, types.Universe.Lookup("error").Type()) }
